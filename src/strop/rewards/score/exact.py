"""Scores of the text itself: exact match with the ground truth, form, and length.

Form and length are meant as parts beside the score of an answer, and ignore the ground truth.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from strop.rewards.score.truth import text_of_truth


def compute_score(solution_str: str, ground_truth: str | int, *, score: float = 1.0) -> float:
    """Return ``score`` if the stripped response equals the stripped ground truth, else 0.

    Raises ``ValueError`` without a ground truth.
    """
    expected = text_of_truth(ground_truth).strip()
    if ground_truth is None or not expected:
        raise ValueError(f"the ground truth is {ground_truth!r}: expected the text of the answer")
    return score if solution_str.strip() == expected else 0.0


THINK_ANSWER = (
    r"<think>(?:(?!</?(?:think|answer)>).)*</think>\s*<answer>(?:(?!</?(?:think|answer)>).)*</answer>"
)
"""The form that DeepSeek-R1 (2025, section 2.2.2) rewards; each tag once."""


def compute_format_score(
    solution_str: str,
    ground_truth: Any = None,
    *,
    pattern: str = THINK_ANSWER,
    score: float = 1.0,
    response_prefix: str = "",
) -> float:
    """Return ``score`` if the whole stripped response matches ``pattern``, else 0.

    ``pattern`` is a regular expression whose dot also matches line ends. ``response_prefix`` is what the
    prompt wrote of the response: templates of models that think end with ``<think>``.

    Raises:
        ValueError: ``pattern`` is not a regular expression.
    """
    try:
        form = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"pattern={pattern!r} is not a regular expression: {error}") from error
    return score if form.fullmatch((response_prefix + solution_str).strip()) else 0.0


Unit = Literal["words", "characters", "tokens"]


def overlong_penalty(length: float, *, max_length: float, buffer: float) -> float:
    """Return 0 up to ``max_length - buffer``, then linearly down to -1 at ``max_length``, and -1 beyond.

    DAPO (Yu et al. 2025), equation 13, in any unit of length. ``buffer=0`` is a step.

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


def compute_length_score(
    solution_str: str,
    ground_truth: Any = None,
    *,
    max_length: float = 1000,
    buffer: float = 200,
    unit: Unit = "words",
    score: float = 1.0,
    n_tokens: int | None = None,
) -> float:
    """Return ``overlong_penalty`` of the response, times ``score``.

    ``unit`` counts words (between white space), characters, or the ``n_tokens`` sampled tokens with the stop
    token, as DAPO does.

    Raises:
        ValueError: an unknown ``unit``, tokens of a text that was not sampled, or lengths as in
            :func:`overlong_penalty`.
    """
    lengths = {"words": len(solution_str.split()), "characters": len(solution_str), "tokens": n_tokens}
    if unit not in lengths:
        raise ValueError(f"unit={unit!r} is unknown (known: {', '.join(map(repr, lengths))})")
    length = lengths[unit]
    if length is None:
        raise ValueError(
            "unit='tokens' needs a sampled response; for a text, expected 'words' or 'characters'"
        )
    return score * overlong_penalty(length, max_length=max_length, buffer=buffer)
