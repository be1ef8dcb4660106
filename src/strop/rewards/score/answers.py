"""The answer in a response, by data source: what samples of one prompt vote for (``maj@k`` of validation)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from strop.rewards.score.choice import extract_label
from strop.rewards.score.gsm8k import extract_number
from strop.rewards.score.math import last_boxed, normalize_answer

Extractor = Callable[[str], str | None]
"""A response's answer in one spelling; None: it gives none."""


def answer_extractor(data_source: str, options: Mapping[str, Any] | None = None) -> Extractor | None:
    """How the built-in scorer of ``data_source`` finds a response's answer; None: it compares no answers.

    ``options`` are the scorer's (``scorer_kwargs``). Two answers are one when they are the same text after
    the scorer's clean-up, with ``math-verify``, too.
    """
    build = _EXTRACTORS.get(data_source)
    return None if build is None else build(options or {})


def _number(options: Mapping[str, Any]) -> Extractor:
    method = options.get("method", "strict")
    return lambda text: extract_number(text, method=method)


def _boxed(options: Mapping[str, Any]) -> Extractor:
    def answer(text: str) -> str | None:
        found = last_boxed(text)
        return None if found is None else normalize_answer(found) or found

    return answer


def _label(options: Mapping[str, Any]) -> Extractor:
    chosen = {name: options[name] for name in ("labels", "method") if name in options}
    return lambda text: extract_label(text, **chosen)


def _whole(options: Mapping[str, Any]) -> Extractor:
    return lambda text: text.strip() or None


_EXTRACTORS: dict[str, Callable[[Mapping[str, Any]], Extractor]] = {
    "openai/gsm8k": _number,
    "lighteval/MATH": _boxed,
    "DigitalLearningGmbH/MATH-lighteval": _boxed,
    "Rowan/hellaswag": _label,
    "strop/arithmetic": _whole,
}
