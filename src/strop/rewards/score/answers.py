"""Extraction of answers by data source, for the votes of ``maj@k`` in validation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from strop.rewards.router import BUILT_IN
from strop.rewards.score.choice import extract_label
from strop.rewards.score.gsm8k import extract_number
from strop.rewards.score.math import last_boxed
from strop.rewards.score.normal_form import normalize_answer

Extractor = Callable[[str], str | None]
"""Returns the normalized answer of a response, or None."""


def answer_extractor(data_source: str, options: Mapping[str, Any] | None = None) -> Extractor | None:
    """Return the extractor of the source's built-in scorer; None if the scorer compares no answers.

    ``options`` are the scorer's (``scorer_kwargs``). Two answers are equal if their normalized text is, also
    with ``math-verify``.
    """
    extract, names = _EXTRACTORS.get(BUILT_IN.get(data_source, ""), (None, ()))
    if extract is None:
        return None
    chosen = {name: value for name, value in (options or {}).items() if name in names}
    return functools.partial(extract, **chosen)


def _boxed(text: str) -> str | None:
    found = last_boxed(text)
    return None if found is None else normalize_answer(found) or found


def _whole(text: str) -> str | None:
    return text.strip() or None


_EXTRACTORS: dict[str, tuple[Callable[..., str | None], tuple[str, ...]]] = {
    "gsm8k": (extract_number, ("method",)),
    "math": (_boxed, ()),
    "choice": (extract_label, ("labels", "method")),
    "exact": (_whole, ()),
}
"""Scorer -> function, and the options of the scorer that it takes."""
