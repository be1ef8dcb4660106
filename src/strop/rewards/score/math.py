r"""MATH (Hendrycks et al. 2021): the answer in the last ``\boxed{...}``.

``compute_score`` compares text after ``normalize_answer``, so that 0.5, 1/2 and \dfrac12 are one answer, x+1
and 1+x are two. With ``method="math-verify"`` the package of that name also compares values.
"""

from __future__ import annotations

import logging
import re
from typing import Literal

from strop.errors import MissingExtraError


def closing_brace(text: str) -> int | None:
    r"""Return the position of the brace that closes the one at position 0, or None if it stays open.

    ``\{`` and ``\}`` are characters, not braces.
    """
    depth, position = 0, 0
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return position
        position += 1
    return None


_TEXT_COMMAND = r"\\(?:text|textbf|textit|textrm|textnormal|mbox|mathrm|mathbf|operatorname)\s*"

_TEXT_GROUP = re.compile(_TEXT_COMMAND + r"\{([^{}]*)\}")

_TRAILING_UNIT = re.compile(_TEXT_COMMAND + r"\{[^{}]*\}(?:\^\{?[0-9]\}?)?$")

_QUANTITY = re.compile(r"[0-9]|\\pi")

_TOKEN = re.compile(r"\\[a-zA-Z]+|[^\\{}]")

# Applied in this order, before white space is removed.
_NOTATION: list[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"[\n\t~]|\\(?:displaystyle|quad|qquad)(?![a-zA-Z])", " "),
        (r"−|–", "-"),
        (r"π", r"\\pi "),
        (r"°|\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])", ""),
        (r",\\!|\{,\}", ""),  # 15,\!000 and 15{,}000: always a thousands separator
        (r"(\\\\)|\\[!,;: ]", r"\1"),  # spaces; the row break of a matrix is matched to step over it
        (r"\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])", ""),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\([lgn]e)q(?![a-zA-Z])", r"\\\1"),
        (r"\\?[$%]", ""),
    ]
]

# Applied in this order, after white space is removed.
_SPELLING: list[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"[.,;:]+$", ""),
        (r"(?<![0-9])\.(?=[0-9])", "0."),
        (r"^(?:[a-zA-Z]{1,2}=|[a-zA-Z]\\in(?![a-zA-Z]))(?=[^=]*$)", ""),
        (r"\\sqrt(\\[a-zA-Z]+|[0-9a-zA-Z])", r"\\sqrt{\1}"),
        (r"([_^])\{([0-9a-zA-Z])\}", r"\1\2"),
        (r"^\(([A-Z])\)$", r"\1"),
        (r"(?<![0-9.])([0-9]+)\.0*(?![0-9])|(?<![0-9.])([0-9]+\.[0-9]*[1-9])0+(?![0-9])", r"\1\2"),
    ]
]

_THOUSANDS = re.compile(r"[-+]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")

_MIXED = re.compile(r"([0-9])\s+([0-9]+)\s*/\s*([0-9]+)")

# Only a whole entry: 2^3/4 is not 2^(3/4).
_RATIO = re.compile(r"(?:^|(?<=[(\[,&\\])|(?<=matrix\}))([-+]?[0-9]+)/([0-9]+)(?=$|[)\],&\\])")

_NEGATIVE_FRACTION = re.compile(r"\\frac\{-([0-9]+)\}\{([0-9]+)\}|\\frac\{([0-9]+)\}\{-([0-9]+)\}")


def normalize_answer(answer: str) -> str:
    """Return the normal form of an answer; it is empty if the answer is only units and signs."""
    text = answer.strip()
    if r"\begin" not in text:  # undo double escaping; in a matrix, two backslashes end a row
        text = text.replace("\\\\", "\\")
    for pattern, replacement in _NOTATION:
        text = pattern.sub(replacement, text)
    text = _without_units(text.strip().rstrip("."))
    text = _TEXT_GROUP.sub(r"\1", text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = re.sub(r"\s+", "", text)
    for pattern, replacement in _SPELLING:
        text = pattern.sub(replacement, text)
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    text = _RATIO.sub(r"\\frac{\1}{\2}", _brace_fractions(text))
    text = _NEGATIVE_FRACTION.sub(lambda m: rf"-\frac{{{m[1] or m[3]}}}{{{m[2] or m[4]}}}", text)
    return text.replace("0.5", r"\frac{1}{2}") if text in ("0.5", "-0.5") else text


def _without_units(text: str) -> str:
    r"""Strip units: ``5\text{ cm}^2`` -> ``5``; keep words that are the whole answer."""
    while match := _TRAILING_UNIT.search(text):
        quantity = text[: match.start()].rstrip()
        if not _QUANTITY.search(quantity):
            break
        text = quantity
    return text


def _brace_fractions(text: str) -> str:
    r"""Add braces: ``\frac12`` -> ``\frac{1}{2}``, ``\frac1{2x}`` -> ``\frac{1}{2x}``, recursively."""
    pieces = []
    while True:
        before, command, rest = text.partition("\\frac")
        pieces.append(before)
        if not command:
            return "".join(pieces)
        pieces.append(command)
        text = rest
        for _ in ("numerator", "denominator"):
            argument, text = _next_argument(text)
            pieces.append(argument and f"{{{_brace_fractions(argument)}}}")


def _next_argument(text: str) -> tuple[str, str]:
    """Return the argument that TeX would take, without braces ("" if there is none), and the rest."""
    if text.startswith("{"):
        depth = 0
        for position, character in enumerate(text):
            depth += (character == "{") - (character == "}")
            if depth == 0:
                return text[1:position], text[position + 1 :]
        return "", text
    token = _TOKEN.match(text)
    return (token[0], text[token.end() :]) if token else ("", text)


Method = Literal["hendrycks", "math-verify"]

_BOXES = ("\\boxed", "\\fbox")


def compute_score(
    solution_str: str, ground_truth: str | int | float, *, method: Method = "hendrycks", score: float = 1.0
) -> float:
    r"""Return ``score`` if the last boxed answer of the response is the ground truth, else 0.

    The ground truth may be the answer or a whole worked solution with a ``\boxed{...}``. A response whose
    last box is not closed (cut at the length limit) has no answer.

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
    r"""Return the content of the last ``\boxed`` or ``\fbox``; None if it is missing, empty or open.

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
    """Return True if two answers are equal as text, before or after normalization."""
    if found == expected:
        return True
    normalized = normalize_answer(expected)
    return bool(normalized) and normalize_answer(found) == normalized


def same_value(found: str, expected: str) -> bool:
    """Return True if ``math-verify`` finds both mathematically equal.

    It may run for very long: its time-outs (by a signal, with an unfinished comparison counted as wrong) are
    off, because every scorer runs under a deadline.
    """
    from math_verify import parse, verify

    gold, target = (parse(f"\\boxed{{{answer}}}", parsing_timeout=0) for answer in (expected, found))
    return verify(gold, target, timeout_seconds=None)


def _require_math_verify() -> None:
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("math-verify", "math", "the scoring method 'math-verify'") from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # silences its warning about disabled time-outs


def _expected_answer(ground_truth: str | int | float) -> str:
    text = str(ground_truth)
    answer = last_boxed(text) if any(command in text for command in _BOXES) else text.strip()
    if ground_truth is None or not answer:
        raise ValueError(f"the ground truth {text[:80]!r} holds no answer")
    return answer
