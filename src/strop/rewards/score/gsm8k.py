"""GSM8K (Cobbe et al. 2021): the number after the last ``####``."""

from __future__ import annotations

import re
from collections import deque
from typing import Literal

from strop.rewards.score.phrases import JOINING, is_unit
from strop.rewards.score.truth import text_of_truth, unpadded

Method = Literal["strict", "flexible"]

_MINUS = "-\N{MINUS SIGN}\N{EN DASH}"
_CURRENCY = "$€£¥₹"
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
# The minus of "10-5" and "8 - 3" is not a sign, nor is the dash of "so many – 5".
_SIGN = rf"(?<![0-9a-zA-Z)%°€£¥₹])[{_MINUS}+](?:(?<![0-9)%][ ].)(?<!–)[ ])?"
_NUMBER = re.compile(
    rf"(?P<sign>{_SIGN})?(?:\\?[{_CURRENCY}][ ]?(?P<inner>[{_MINUS}+])?)?(?P<digits>{_DIGITS})"
)
_MARKED = re.compile(rf"[ \t](?:[ \t*_`\"'(\[]|\$?\\boxed\{{)*{_NUMBER.pattern}")
_AROUND_UNIT = f" \t\r.,;:!%°()[]{{}}\"'`*_\\{_CURRENCY}"
_CONTINUED = re.compile(rf"(?i:{JOINING})|(?:to |[{_MINUS}+*/,;&|=])? ?[{_CURRENCY}]?[0-9]")


def compute_score(
    solution_str: str,
    ground_truth: str | int | float,
    *,
    method: Method = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Return ``score`` for the number of the ground truth, ``format_score`` for another one, 0 for none.

    Values are compared: 18, 18.0 and $18.00 are equal. The ground truth may be a number or a whole worked
    answer that ends in ``#### number``. For ``method`` see :func:`extract_number`.

    Raises:
        ValueError: an unknown ``method``, or a ground truth without a number.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"method={method!r} is unknown (known: 'strict', 'flexible')")
    expected = _expected_number(ground_truth)
    found = extract_number(solution_str, method=method)
    if found is None:
        return 0.0
    found, expected = unpadded(found, expected)
    return score if found == expected else format_score


def extract_number(text: str, *, method: Method = "strict") -> str | None:
    r"""Return the response's number in its shortest notation (1,200.50 as ``1200.5``), or None.

    ``strict``: the number after the last ``####`` and a space; only a unit and punctuation may follow in its
    line, and only markup may stand around it (``**18**``, ``\boxed{18}``). ``flexible``: the last number
    anywhere in the response.
    """
    if method == "flexible":
        last = deque(_NUMBER.finditer(text), maxlen=1)
        return _shortest(last[0]) if last else None
    _, marker, answer = text.rpartition("####")
    found = _MARKED.match(answer)
    if not marker or not found:
        return None
    line, _, further = answer[found.end() :].partition("\n")
    unit = line.replace(r"\text", "").strip(_AROUND_UNIT)
    if (unit and not is_unit(unit)) or _CONTINUED.match(further.lstrip()):
        return None
    return _shortest(found)


def _expected_number(ground_truth: str | int | float) -> str:
    text = text_of_truth(ground_truth).rpartition("####")[2].strip()
    found = _NUMBER.fullmatch(text.removesuffix("."))
    if not found:
        raise ValueError(f"the ground truth {text[:80]!r} is not a number")
    return _shortest(found)


def _shortest(number: re.Match[str]) -> str:
    whole, _, decimals = number["digits"].replace(",", "").partition(".")
    decimals = decimals.rstrip("0")
    value = (whole or "0") + (decimals and f".{decimals}")
    negative = (number["sign"] or number["inner"] or "+")[0] in _MINUS
    return f"-{value}" if negative and value != "0" else value
