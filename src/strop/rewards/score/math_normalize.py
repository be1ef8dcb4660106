r"""One spelling for each answer of the MATH data set.

The rules are those of Hendrycks et al. 2021 (arXiv:2103.03874, the released ``is_equiv``): spacing, \left and
\right, degrees, dollars, percent and units go; \dfrac12, \frac12, 1/2 and 0.5 become \frac{1}{2}; \sqrt2
becomes \sqrt{2}; .5 becomes 0.5; a short "x =" in front goes. Where they lose a part of the answer or miss a
frequent spelling, these rules differ:

- a unit is a text group at the end of an answer with a number in it: "3\text{ and }5" keeps its 5;
- one spelling also for mixed numbers (5 3/4), the minus sign of a fraction, thousands separators, zeros at
  the end of a decimal, x_{2} and x_2, \text{(C)} and C, and a/b as an entry of a tuple or a matrix.

Values are not computed: 2\sqrt{2} and \sqrt{8} differ. ``math-verify`` is there for that.
"""

from __future__ import annotations

import re

_TEXT_COMMAND = r"\\(?:text|textbf|textit|textrm|textnormal|mbox|mathrm|mathbf|operatorname)\s*"
_TEXT_GROUP = re.compile(_TEXT_COMMAND + r"\{([^{}]*)\}")
_TRAILING_UNIT = re.compile(_TEXT_COMMAND + r"\{[^{}]*\}(?:\^\{?[0-9]\}?)?$")
_QUANTITY = re.compile(r"[0-9]|\\pi")
_TOKEN = re.compile(r"\\[a-zA-Z]+|[^\\{}]")

# (pattern, replacement), in this order. White space is still there.
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

# White space is gone.
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
# Only a whole entry: in 2^3/4 the 3 and the 4 do not belong together.
_RATIO = re.compile(r"(?:^|(?<=[(\[,&\\])|(?<=matrix\}))([-+]?[0-9]+)/([0-9]+)(?=$|[)\],&\\])")
_NEGATIVE_FRACTION = re.compile(r"\\frac\{-([0-9]+)\}\{([0-9]+)\}|\\frac\{([0-9]+)\}\{-([0-9]+)\}")


def normalize_answer(answer: str) -> str:
    """The answer in its one spelling; it may be empty when nothing but units and signs was there."""
    text = answer.strip()
    if r"\begin" not in text:  # text that was escaped twice; in a matrix, two backslashes end a row
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
    r"""``5\text{ cm}^2`` -> ``5``; words that are the answer themselves stay."""
    while match := _TRAILING_UNIT.search(text):
        quantity = text[: match.start()].rstrip()
        if not _QUANTITY.search(quantity):
            break
        text = quantity
    return text


def _brace_fractions(text: str) -> str:
    r"""``\frac12`` and ``\frac1{2x}`` -> ``\frac{1}{2}`` and ``\frac{1}{2x}``, also inside fractions."""
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
    """The argument that TeX would take (without its braces) and what follows; "" when there is none."""
    if text.startswith("{"):
        depth = 0
        for position, character in enumerate(text):
            depth += (character == "{") - (character == "}")
            if depth == 0:
                return text[1:position], text[position + 1 :]
        return "", text
    token = _TOKEN.match(text)
    return (token[0], text[token.end() :]) if token else ("", text)
