r"""MATH (Hendrycks et al. 2021): the answer in the last ``\boxed{...}``.

``compute_score`` compares as text, after the clean-up of ``math_normalize`` (so 0.5, 1/2 and \dfrac12 are one
answer, x+1 and 1+x are two). With ``method="math-verify"`` the package of that name also compares values.
"""

from __future__ import annotations

import logging
from typing import Literal

from strop.errors import MissingExtraError
from strop.latex import closing_brace
from strop.rewards.score.math_normalize import normalize_answer

Method = Literal["hendrycks", "math-verify"]

_BOXES = ("\\boxed", "\\fbox")


def compute_score(
    solution_str: str, ground_truth: str | int | float, *, method: Method = "hendrycks", score: float = 1.0
) -> float:
    r"""``score`` when the last boxed answer of the response is the ground truth, else 0.

    The ground truth may be the answer or a whole worked solution with a ``\boxed{...}``. A response whose
    last box is not closed (cut at the length limit) has no answer.

    Raises:
        ValueError: an unknown ``method``, or a ground truth without an answer.
        MissingExtraError: ``math-verify`` is asked for and not installed.
    """
    if method not in ("hendrycks", "math-verify"):
        raise ValueError(f"method={method!r} is unknown (known: 'hendrycks', 'math-verify')")
    judges = [same_answer]
    if method == "math-verify":
        _require_math_verify()
        judges.append(same_value)
    expected = _expected_answer(ground_truth)
    found = last_boxed(solution_str)
    if found is None:
        return 0.0
    return score if any(judge(found, expected) for judge in judges) else 0.0


def last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed`` or ``\fbox``; None when there is none, or it is empty or open.

    Braces are balanced; ``\{`` and ``\}`` are text. Without braces (``\boxed 5``) the answer goes up to the
    next ``$`` or the end of the line.
    """
    start, command = max((text.rfind(command), command) for command in _BOXES)
    if start < 0:
        return None
    rest = text[start + len(command) :].lstrip(" ")
    if not rest.startswith("{"):
        return rest.partition("\n")[0].partition("$")[0].strip() or None
    end = closing_brace(rest)
    return None if end is None else rest[1:end].strip() or None


def same_answer(found: str, expected: str) -> bool:
    """Whether two answers are one text, as they stand or after normalisation."""
    if found == expected:
        return True
    normalized = normalize_answer(expected)
    return bool(normalized) and normalize_answer(found) == normalized


def same_value(found: str, expected: str) -> bool:
    """Whether ``math-verify`` reads both as one mathematical value.

    It may run for very long: its own time-outs (a signal, and an unfinished comparison counts as wrong) are
    off, since every scorer runs under a deadline.
    """
    from math_verify import parse, verify

    gold, target = (parse(f"\\boxed{{{answer}}}", parsing_timeout=0) for answer in (expected, found))
    return verify(gold, target, timeout_seconds=None)


def _require_math_verify() -> None:
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("math-verify", "math", "the scoring method 'math-verify'") from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time-outs are off


def _expected_answer(ground_truth: str | int | float) -> str:
    text = str(ground_truth)
    answer = last_boxed(text) if any(command in text for command in _BOXES) else text.strip()
    if ground_truth is None or not answer:
        raise ValueError(f"the ground truth {text[:80]!r} holds no answer")
    return answer
