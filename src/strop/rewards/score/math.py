r"""MATH (Hendrycks et al. 2021): the answer in the last ``\boxed{...}``.

``compute_score`` compares normal forms (:mod:`strop.rewards.score.normal_form`): 0.5, 2/4 and \dfrac12 are
one answer, x+1 and 1+x are two. With ``method="math-verify"`` values are compared as well
(:mod:`strop.rewards.score.value`), with the packages that math-verify installs.
"""

from __future__ import annotations

import re
from typing import Literal

from strop.errors import MissingExtraError
from strop.rewards.score.normal_form import MAX_LENGTH, closing_brace, normalize_answer
from strop.rewards.score.truth import text_of_truth, unpadded
from strop.rewards.score.value import same_value

Method = Literal["hendrycks", "math-verify"]

_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")
# Three words in a row. The letters of "\frac{abc}{ab+bc}" and "AB, BC, CD" are products and names of lines.
_PROSE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}(?:[\s~,]|\\ )+[a-zA-Z]{2,}(?:[\s~]|\\ )+[a-zA-Z]{2,}")
_CONJUNCTIONS = frozenset(["or", "and"])
_LETTER = re.compile(r"\W*([a-zA-Z])\s*=(?:[^=a-zA-Z\\]|\\[a-zA-Z]+)*")
_UNITS = """
    mm millimeter millimetre, cm centimeter centimetre, m meter metre, km kilometer kilometre, in inch inches,
    ft foot feet, yd yard, mi mile, mg milligram, g gram, kg kilogram, s sec second, min minute, h hr hour,
    day, week, month, year, ml milliliter, l liter litre, cent, dollar
"""
_MEASURES = {word: number for number, words in enumerate(_UNITS.split(",")) for word in words.split()}
# One number with a unit: in 3m-6s both letters are variables.
_MEASURE = re.compile(
    r"(?:(?![0-9][a-zA-Z]).)*"
    rf"[0-9][^a-zA-Z]*(?:\\[a-z]+\{{)?[ ~]*({'|'.join(_MEASURES)})s?(?![a-zA-Z])(?!.*[0-9][a-zA-Z]).*"
)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])[ ]*")


def compute_score(
    solution_str: str, ground_truth: str | int | float, *, method: Method = "hendrycks", score: float = 1.0
) -> float | None:
    r"""Return ``score`` if the last boxed answer of the response is the ground truth, else 0.

    Return None, for every response, if the ground truth is a sentence: another wording cannot be judged.
    The ground truth may be the answer or a whole worked solution with a ``\boxed{...}``. A response whose
    last box is not closed (cut at the length limit) or holds another box has no answer. An answer with
    another variable or common unit (``y = 5`` for ``x = 5``, ``5 m`` for ``5 cm``) scores 0.

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
    if _is_sentence(expected):
        return None
    found = last_boxed(solution_str)
    if found is not None:
        found, expected = unpadded(found, expected)
    if found is None or _another(_LETTER, found, expected) or _another(_MEASURE, found, expected):
        return 0.0
    return score if any(judge(found, expected) for judge in judges) else 0.0


def _is_sentence(expected: str) -> bool:
    """Return True for four words or more, three of them in a row, that are not the unit of a number."""
    words = set(_WORD.findall(expected)) - _CONJUNCTIONS
    return (
        len(words) > 3
        and _PROSE.search(expected) is not None
        and not normalize_answer(expected)[:1].isdigit()
    )


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


def _another(pattern: re.Pattern[str], found: str, expected: str) -> bool:
    """Return True if both have a variable (or a common unit), and another one: ``y = 5`` for ``x = 5``."""
    if max(len(found), len(expected)) > MAX_LENGTH:
        return False
    names = [match[1] for match in map(pattern.fullmatch, (found, expected)) if match]
    return len(names) == 2 and len({_MEASURES.get(name, name) for name in names}) == 2


def _require_math_verify() -> None:
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("math-verify", "math", "the scoring method 'math-verify'") from error


def _expected_answer(ground_truth: str | int | float) -> str:
    text = text_of_truth(ground_truth)
    answer = last_boxed(text) if _BOX.search(text) else text.strip()
    if ground_truth is None or not answer:
        raise ValueError(f"the ground truth {text[:80]!r} holds no answer")
    return answer
