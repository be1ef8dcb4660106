"""Extraction of answers by data source, for the votes of ``maj@k`` in validation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from strop.rewards.score.choice import extract_label
from strop.rewards.score.gsm8k import extract_number
from strop.rewards.score.math import last_boxed, normalize_answer

Extractor = Callable[[str], str | None]
"""Returns the normalized answer of a response, or None."""


def answer_extractor(data_source: str, options: Mapping[str, Any] | None = None) -> Extractor | None:
    """Return the extractor of the source's built-in scorer; None if the scorer compares no answers.

    ``options`` are the scorer's (``scorer_kwargs``). Two answers are equal if their normalized text is, also
    with ``math-verify``.
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
