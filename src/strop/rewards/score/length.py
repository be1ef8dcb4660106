"""The length of a response: a term beside the score of the answer."""

from __future__ import annotations

from typing import Any, Literal

Unit = Literal["words", "characters"]


def overlong_penalty(length: float, *, max_length: float, buffer: float) -> float:
    """0 up to ``max_length - buffer``, then in a straight line down to -1 at ``max_length``, and -1 beyond.

    DAPO (Yu et al. 2025), equation 13; in tokens there, in any one unit here. ``buffer=0`` is a step.

    Raises:
        ValueError: not ``0 <= buffer <= max_length``, or ``max_length`` is not positive.
    """
    if max_length <= 0 or not 0 <= buffer <= max_length:
        raise ValueError(
            f"expected 0 <= buffer <= max_length and max_length > 0, "
            f"found buffer={buffer}, max_length={max_length}"
        )
    over = length - (max_length - buffer)
    if over <= 0:
        return 0.0
    return -1.0 if over >= buffer else -over / buffer


def compute_score(
    solution_str: str,
    ground_truth: Any = None,
    *,
    max_length: float = 1000,
    buffer: float = 200,
    unit: Unit = "words",
    score: float = 1.0,
) -> float:
    """``overlong_penalty`` of the response, times ``score``; the ground truth is not looked at.

    A scorer sees text, no tokens: ``unit`` counts words (between white space) or characters.

    Raises:
        ValueError: an unknown ``unit``, or lengths as in :func:`overlong_penalty`.
    """
    if unit not in ("words", "characters"):
        raise ValueError(f"unit={unit!r} is unknown (known: 'words', 'characters')")
    length = len(solution_str.split()) if unit == "words" else len(solution_str)
    return score * overlong_penalty(length, max_length=max_length, buffer=buffer)
