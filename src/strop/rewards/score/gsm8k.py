"""GSM8K (Cobbe et al. 2021): the number after the last ``####``."""

from __future__ import annotations

import re
from typing import Literal

Method = Literal["strict", "flexible"]

# A number as people write it: sign, dollars, separators. The minus of "10-5" is not a sign; text after the
# number ("18 apples") is ignored.
_NUMBER = r"(?:(?<![0-9a-zA-Z)])[-+])?(?:\$[-+]?)?(?:[0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)"
_MARKED = re.compile(rf"####[ \t]+({_NUMBER})")
_ANYWHERE = re.compile(_NUMBER)


def compute_score(
    solution_str: str,
    ground_truth: str | int | float,
    *,
    method: Method = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Return ``score`` for the right number, ``format_score`` for another one, 0 for none.

    ``strict`` takes the last ``#### number``, ``flexible`` the last number anywhere in the response.
    Numbers are compared as strings of digits, after ``,``, ``$``, ``+`` and a trailing ``.`` are removed (18
    and 18.0 differ). The ground truth may be a number or a whole worked answer that ends in ``#### number``.

    Raises:
        ValueError: an unknown ``method``, or a ground truth without a number.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"method={method!r} is unknown (known: 'strict', 'flexible')")
    expected = _expected_number(ground_truth)
    found = extract_number(solution_str, method=method)
    if found is None:
        return 0.0
    return score if found == expected else format_score


def extract_number(text: str, *, method: Method = "strict") -> str | None:
    """Return the response's answer as a cleaned string of digits, or None."""
    numbers = (_MARKED if method == "strict" else _ANYWHERE).findall(text)
    return _clean(numbers[-1]) if numbers else None


def _expected_number(ground_truth: str | int | float) -> str:
    text = str(ground_truth)
    if "####" in text:
        text = text.rpartition("####")[2]
    if not re.fullmatch(_NUMBER, text.strip()):
        raise ValueError(f"the ground truth {text.strip()[:80]!r} is not a number")
    return _clean(text.strip())


def _clean(number: str) -> str:
    return number.replace(",", "").replace("$", "").replace("+", "").removesuffix(".")
