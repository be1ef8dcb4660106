"""Multiple choice (HellaSwag): the label that the response chooses."""

from __future__ import annotations

import re
from typing import Literal

from strop.rewards.score.phrases import JOINING
from strop.rewards.score.truth import text_of_truth

Method = Literal["strict", "flexible"]

_OPEN = r"(?:\\boxed\{|\\(?:text(?:bf)?|math(?:rm|bf))\{|(?i:option|choice)\b|[\s(\[{*_`\"'$])*"
_CLOSE = r"[)\]}*_`\"'$.,:;!\s]*"
# Valid after a label; "Answer: A man" starts with a word.
_END = r"(?=\s*(?:$|\n|[)\]}*_`\"'$.,:;!])|\s+(?:[(–—-]|because\b))"
# "B. A person would": an "A" at the start of a sentence, unless it joins another label.
_ARTICLE = r"(?<=[.):!?*\"”]\s)A (?!(?:or|and)\b)[a-z]"
# The word in any case; starting with a letter, it is found twice as fast as with \b.
_ANSWER = r"[aA](?<!\w.)(?i:nswer)\b"
# "answer: ", "The answer is ", "**Answer**: ". As _OPEN also matches white space, a run of it is not divided
# between the two in every possible way (*+), which would take quadratic time.
_MARK = rf"{_ANSWER}[*_]*\s*(?:is\b\s*+:?|:)"
# A mark that decides even when no label follows; "that answer is certain" is prose.
_ANNOUNCED = re.compile(rf"{_ANSWER}[*_]*\s*(?:is\s*)?:|[tT](?<!\w.)(?i:he\s+(?:\w+\s+)?answer\s+is\b)")
# "C, possibly D", "C\nor D", and "C, E" whatever the labels; "C. and he leaves" is the ending itself.
_JOINED = re.compile(
    rf"[)\]}}*_`\"'$]*(?:(?:[ \t]*[,;(–—-]|[.:;!]?[ \t]*\n)\s*(?i:{JOINING})|[ \t]*[,;][ \t]*(?!I\b)[A-Z]\b)"
)


def compute_score(
    solution_str: str,
    ground_truth: str | int,
    *,
    method: Method = "strict",
    labels: str = "ABCD",
    score: float = 1.0,
) -> float:
    """Return ``score`` if the response chooses the label of the ground truth, else 0.

    ``labels`` are the names of the choices, one character each, in order. The ground truth is one of them, or
    (unless digits are labels) the number of the choice counted from 0, as in HellaSwag's ``label``.

    Raises:
        ValueError: an unknown ``method``, or a ground truth that names no choice.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"method={method!r} is unknown (known: 'strict', 'flexible')")
    expected = _expected_label(ground_truth, labels)
    return score if extract_label(solution_str, labels=labels, method=method) == expected else 0.0


def extract_label(text: str, *, labels: str = "ABCD", method: Method = "strict") -> str | None:
    r"""Return the label that the response chooses, or None.

    ``strict``: the label after the last "answer:" or "answer is", or the whole response if it is a label;
    ignores brackets, quotes and asterisks around it. ``flexible`` also accepts, in this order, the last
    ``\boxed{}``, a label alone in the last line, and one at the start as in "C. ending". Labels are
    case-sensitive. Two labels ("C or D", "Answer: C, possibly D") are no choice.
    """
    label = rf"{_OPEN}([{re.escape(labels)}])(?!_*[^\W_])"
    marked, announced = _last(_MARK + label, text), _last(_ANNOUNCED, text)
    if announced and not (marked and marked.end() > announced.end()):
        return None
    if marked:
        return _only_label(marked, text, labels)
    if alone := _alone(label, text):
        return alone
    if method == "strict":
        return None
    if r"\boxed" in text:
        boxed = re.compile(label).match(text, text.rfind(r"\boxed"))
        return _only_label(boxed, text, labels) if boxed else None
    lines = text.strip().splitlines()
    return (_alone(label, lines[-1]) or _leading(label, text, labels)) if lines else None


def _last(pattern: str | re.Pattern[str], text: str) -> re.Match[str] | None:
    return max(re.finditer(pattern, text), key=lambda found: found.start(), default=None)


def _only_label(found: re.Match[str], text: str, labels: str) -> str | None:
    """Return the label found, unless it is part of a word or its sentence goes on to another label."""
    rest = text[found.end() :]
    if not re.match(_END, rest) or _JOINED.match(rest):
        return None
    another = rf"(?<![\w'’-])(?!{_ARTICLE})[{re.escape(labels)}](?![\w'’-])"
    line, _, further = rest.partition("\n")
    goes_on = re.search(another, line) or re.match(
        rf"[-–—/&|+,; \t]*+{_OPEN}{another}{_CLOSE}(?:$|\n)", further
    )
    return None if goes_on else found[1]


def _alone(label: str, text: str) -> str | None:
    found = re.fullmatch(label + _CLOSE, text)
    return found[1] if found else None


def _leading(label: str, text: str, labels: str) -> str | None:
    """Match ``C. ending``, ``(C) ending``, ``C: ending``; not "A man", which starts with a word."""
    found = re.match(label + r"(?=[*_]*[).:\]])", text)
    return found and _only_label(found, text, labels)


def _expected_label(ground_truth: str | int, labels: str) -> str:
    text = text_of_truth(ground_truth).strip()
    if len(text) == 1 and text in labels:
        return text
    if text.isascii() and text.isdigit() and not set(labels) & set("0123456789") and int(text) < len(labels):
        return labels[int(text)]
    raise ValueError(
        f"the ground truth {text[:80]!r} names no choice: expected one of {', '.join(labels)}, "
        f"or a number below {len(labels)}"
    )
