r"""MATH (Hendrycks et al. 2021): the answer in the last ``\boxed{...}``.

``compute_score`` compares normal forms (:mod:`strop.rewards.score.normal_form`): 0.5, 2/4 and \dfrac12 are
one answer, x+1 and 1+x are two. With ``method="math-verify"`` the package of that name also compares values.
"""

from __future__ import annotations

import logging
import re
from typing import Literal

from strop.errors import MissingExtraError
from strop.rewards.score.normal_form import closing_brace, normalize_answer

Method = Literal["hendrycks", "math-verify"]

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])[ ]*")


def compute_score(
    solution_str: str, ground_truth: str | int | float, *, method: Method = "hendrycks", score: float = 1.0
) -> float:
    r"""Return ``score`` if the last boxed answer of the response is the ground truth, else 0.

    The ground truth may be the answer or a whole worked solution with a ``\boxed{...}``. A response whose
    last box is not closed (cut at the length limit) or holds another box has no answer.

    Raises:
        ValueError: an unknown ``method``, or a ground truth without an answer.
        MissingExtraError: ``math-verify`` is not installed.
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
    r"""Return the content of the last ``\boxed`` or ``\fbox``; None if it is missing, empty, open or nested.

    Braces are balanced; ``\{`` and ``\}`` are text. Without braces (``\boxed 5``) the answer goes up to the
    next ``$`` or the end of the line.
    """
    answer, position = "", 0
    while box := _BOX.search(text, position):
        position = box.end()
        if text.startswith("{", position):
            end = closing_brace(text, position)
            if end is None:
                return None
            answer, position = text[position + 1 : end], end
        else:
            answer = text[position:].partition("\n")[0].partition("$")[0]
    return None if _BOX.search(answer) else answer.strip() or None


def same_answer(found: str, expected: str) -> bool:
    """Return True if two answers are equal as text, before or after normalization.

    ``70,110`` is a number, and where the other answer is the list ``70, 110`` that list.
    """
    if found == expected:
        return True
    normalized, other = normalize_answer(expected), normalize_answer(found)
    if other == normalized:
        return bool(normalized)
    lists = "," in found and "," in expected
    return lists and (
        normalize_answer(expected, grouped=False) == other
        or normalize_answer(found, grouped=False) == normalized
    )


def same_value(found: str, expected: str) -> bool:
    r"""Return True if both answers have the same structure, and equal values in each of its places.

    Places are separated by commas, brackets, relations, ``&`` and ``\cup``, so that ``math-verify`` compares
    single expressions: of anything else it may read a part and ignore the rest. A place that is a number in
    ``expected`` must be that number: ``2+2`` is not an answer for 4.

    The comparison may run for very long: the package's time-outs (by a signal, with an unfinished comparison
    counted as wrong) are off, because every scorer runs under a deadline.
    """
    places, expected_places = _places(found), _places(expected)
    return len(places) == len(expected_places) and all(
        one == other or _same_expression(one, other)
        for one, other in zip(places, expected_places, strict=True)
    )


_STRUCTURE = re.compile(
    r"(,|[\[\]=<>:;|&]|\\[{}\\]|\\(?:cup|cap|in|n?[lg]e|ne)(?![a-zA-Z])|\\(?:begin|end)\{[a-z]*\})"
)

_EXPRESSION = re.compile(
    r"(?:[0-9+\-*/^(){} ]|(?<![a-zA-Z])(?!or)[a-zA-Z]{1,2}(?![a-zA-Z])"
    r"|\\(?:frac|sqrt|pi|alpha|beta|theta|(?:arc)?(?:sin|cos|tan)|cot|sec|csc|log|ln)(?![a-zA-Z]))+"
)

_NUMBER = re.compile(r"-?(?:[0-9]+|\\frac\{[0-9]+\}\{[0-9]+\})")


def _places(answer: str) -> list[str]:
    """Split a normal form into expressions and what is between them; brackets of tuples are between."""
    places = []
    for piece in map(str.strip, _STRUCTURE.split(normalize_answer(answer))):
        unclosed = piece.count("(") - piece.count(")")
        places += [piece[:unclosed], piece[unclosed:]] if unclosed else [piece]
    return places


def _same_expression(found: str, expected: str) -> bool:
    from math_verify import parse, verify

    if _NUMBER.fullmatch(expected) or not all(map(_EXPRESSION.fullmatch, (found, expected))):
        return False
    gold, target = (
        parse(f"\\boxed{{{text}}}".replace("*", r"\cdot "), parsing_timeout=0) for text in (expected, found)
    )
    return verify(gold, target, timeout_seconds=None)


def _require_math_verify() -> None:
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("math-verify", "math", "the scoring method 'math-verify'") from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # silences its warning about disabled time-outs


def _expected_answer(ground_truth: str | int | float) -> str:
    text = str(ground_truth)
    answer = last_boxed(text) if _BOX.search(text) else text.strip()
    if ground_truth is None or not answer:
        raise ValueError(f"the ground truth {text[:80]!r} holds no answer")
    return answer
