"""The form of a response, whatever it says: a term beside the score of the answer."""

from __future__ import annotations

import re
from typing import Any

# The shape that DeepSeek-R1 (2025, section 2.2.2) rewards; each tag once.
THINK_ANSWER = (
    r"<think>(?:(?!</?(?:think|answer)>).)*</think>\s*<answer>(?:(?!</?(?:think|answer)>).)*</answer>"
)


def compute_score(
    solution_str: str, ground_truth: Any = None, *, pattern: str = THINK_ANSWER, score: float = 1.0
) -> float:
    """``score`` when the whole response, without white space around it, has the form of ``pattern``, else 0.

    ``pattern`` is a regular expression whose dot also matches line ends. The ground truth is not looked at.

    Raises:
        ValueError: ``pattern`` is not a regular expression.
    """
    try:
        form = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"pattern={pattern!r} is not a regular expression: {error}") from error
    return score if form.fullmatch(solution_str.strip()) else 0.0
