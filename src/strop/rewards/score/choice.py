"""Multiple choice (HellaSwag): the label that the response chooses."""

from __future__ import annotations

import re
from typing import Literal

Method = Literal["strict", "flexible"]

_OPEN = r"(?:\\boxed\{|\\text\{|[\s(\[{*_\"'$])*"
_CLOSE = r"[)\]}*_\"'$.,:;!\s]*"
# Valid after a label; "Answer: A man" starts with a word.
_END = r"(?=\s*(?:$|\n|[)\]}*_\"'$.,:;!]))"
# "B. A person would": an "A" after a closed label begins a sentence, unless it joins another label.
_ARTICLE = rf"{_CLOSE}[.):]{_CLOSE}(?<=\s)A (?!(?:or|and)\b)[a-z]"
# "answer: ", "The answer is ", "**Answer**: "
_MARK = r"(?i:\banswer\b)[*_]*\s*(?:is\b\s*:?|:)"


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
    case-sensitive. Two labels ("C or D", "Answer: C, D") are no choice.
    """
    label = rf"{_OPEN}([{re.escape(labels)}])(?!\w)"
    if marked := _last(_MARK + label, text):
        return _only_label(marked, text, label)
    if alone := _alone(label, text):
        return alone
    if method == "strict":
        return None
    if boxed := _last(r"(?=\\boxed\{)" + label, text):
        return _only_label(boxed, text, label)
    lines = text.strip().splitlines()
    return (_alone(label, lines[-1]) or _leading(label, text)) if lines else None


def _last(pattern: str, text: str) -> re.Match[str] | None:
    return max(re.finditer(pattern, text), key=lambda found: found.start(), default=None)


def _only_label(found: re.Match[str], text: str, label: str) -> str | None:
    """Return the label found, unless it is part of a word or joined to another label."""
    rest = text[found.end() :]
    line = rest.partition("\n")[0]
    another = re.match(rf"{_CLOSE}(?:(?:or|and)\b|[/&|])?{label}", line) and not re.match(_ARTICLE, line)
    return found[1] if re.match(_END, rest) and not another else None


def _alone(label: str, text: str) -> str | None:
    found = re.fullmatch(label + _CLOSE, text)
    return found[1] if found else None


def _leading(label: str, text: str) -> str | None:
    """Match ``C. ending``, ``(C) ending``, ``C: ending``; not "A man", which starts with a word."""
    found = re.match(label + r"[*_]*[).:\]]", text)
    return found[1] if found else None


def _expected_label(ground_truth: str | int, labels: str) -> str:
    text = str(ground_truth).strip()
    if len(text) == 1 and text in labels:
        return text
    if text.isascii() and text.isdigit() and not set(labels) & set("0123456789") and int(text) < len(labels):
        return labels[int(text)]
    raise ValueError(
        f"the ground truth {text[:80]!r} names no choice: expected one of {', '.join(labels)}, "
        f"or a number below {len(labels)}"
    )
