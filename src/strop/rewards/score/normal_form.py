r"""Normal form of answers in LaTeX: two spellings of one answer have the same.

A number in any notation (``1{,}200``, ``7.50``, ``\frac{4}{6}``, ``2\frac12``) becomes its exact value.
Everything else stays as written, without spaces, units, and signs of currency, percent and degrees. Nothing
is computed: ``2+3`` is not 5. Words that are no unit stay, so that ``2\text{ or }3`` equals only itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fractions import Fraction

from strop.rewards.score.phrases import is_unit

MAX_LENGTH = 400
"""A longer answer is its own normal form. (In MATH the longest has 81 characters.)"""

_BRACE = re.compile(r"\\.|[{}()]", re.DOTALL)
_CLOSING = {"{": "}", "(": ")"}


def closing_brace(text: str, start: int = 0, opening: str = "{") -> int | None:
    r"""Return the position of the brace or bracket that closes the one at ``start``; None if it stays open.

    ``\{`` and ``\}`` are characters, not braces.
    """
    depth = 0
    for found in _BRACE.finditer(text, start):
        depth += (found[0] == opening) - (found[0] == _CLOSING[opening])
        if depth == 0:
            return found.start()
    return None


_UNICODE = str.maketrans(
    {
        **dict.fromkeys("−–‑", "-"),
        "°": r"\degree ",
        "π": r"\pi ",
        "∞": r"\infty ",
        "√": r"\sqrt ",
        "·": r"\cdot ",
        "×": r"\times ",
        "÷": "/",
        "²": "^2",
        "³": "^3",
        **{sign: f"^{number}" for number, sign in enumerate("⁴⁵⁶⁷⁸⁹", 4)},
        "½": r"\frac12",
        "¼": r"\frac14",
        "¾": r"\frac34",
        "⅓": r"\frac13",
        "⅔": r"\frac23",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "∪": r"\cup ",
        "∈": r"\in ",
        "∅": r"\emptyset ",
        "θ": r"\theta ",
        "α": r"\alpha ",
        "β": r"\beta ",
        "，": ",",
        "（": "(",
        "）": ")",
        "\N{NO-BREAK SPACE}": " ",
        "\N{NARROW NO-BREAK SPACE}": " ",
        "\N{THIN SPACE}": " ",
    }
)

_UNICODE_ROOT = re.compile("√([0-9]+)")


def _repeating(decimal: re.Match[str]) -> str:
    r"""Return ``0.1\overline{6}`` as a fraction."""
    whole, fixed, period = decimal.groups()
    nines = 10 ** len(period) - 1
    value = Fraction(int(whole + fixed or 0) * nines + int(period), nines * 10 ** len(fixed))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


_SPELLINGS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"\A(\*\*|`)([^*`]+)\1\Z"), r"\2"),  # Markdown
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\\(?:left|right)(?![a-zA-Z])"), ""),
    (re.compile(r"\\exp(?![a-zA-Z])|(?<![a-zA-Z\\])exp(?=\s*\()"), " e^"),
    (re.compile(r"(?<![a-zA-Z\\])(sqrt(?=\s*[({])|pi(?![a-zA-Z]))"), r"\\\1"),
    (re.compile(r"\\div(?![a-zA-Z])"), "/"),
    (re.compile(r"<="), r"\\le "),
    (re.compile(r">="), r"\\ge "),
    (  # 4:30 PM, 4:30 p.m., 9\text{ a.m.}
        re.compile(
            r"(?<=[0-9])((?:[\s~]|\\[ ,;:!]|\\(?:text|mbox|mathrm)\s*\{)*)([aApP])\.?\s*[mM](?![a-zA-Z])\.?"
        ),
        lambda found: f"{found[1]}{found[2].lower()}m",
    ),
    (re.compile(r"([0-9]*)\.([0-9]*)\\(?:overline|bar|dot)\s*\{?([0-9]+)\}?", re.ASCII), _repeating),
)

_TEXT = (
    r"\\(?:text|textbf|textit|textrm|textnormal|mbox|mathrm|mathbf|boldsymbol|operatorname)"
    r"\s*\{(?P<words>[^{}]*)\}"
)
_ALL_TEXT = re.compile(_TEXT)
_AND = re.compile(
    r"(?:,(?:\\[,;: ])?)?\s*(?:\\(?:text|mbox)\s*\{\s*and\s*\}|(?<![a-zA-Z\\])and(?![a-zA-Z]))"
    r"(?=\s*(?:[-+]\s*)?(?:[0-9]|\\(?!text|mbox|math)))"
)
_TITLE_CASE = re.compile("[A-Z][a-z]{2,}")
_ARRAY = re.compile(
    r"(?:\\left)?\s*[(\[]\s*\\begin\{(array|(?:small)?matrix)\}(?:\s*\{[lcr| ]*\})?(.*?)"
    r"\\end\{\1\}\s*(?:\\right)?\s*[)\]]",
    re.DOTALL,
)
_ROW_END = re.compile(r"\\\\\[[0-9.]+[a-z]+\]")
_LAST_WORDS = re.compile(
    rf"(?:{_TEXT}|(?<![a-zA-Z\\{{])([a-zA-Z]+(?:[ ./]+[a-zA-Z]+)*))"
    r"(?:\s*\^\s*\{?\s*[23]\s*\}?)?(?:[\s.,;$~]|\\[!,;:)\] ])*\\?$"
)
_LAST_SPACES = re.compile(r"(?:\s|~|\\[!,;: ])+$")
_QUANTITY = re.compile(r"[0-9]|\\pi")
_WORD = re.compile("[a-zA-Z]+")
_SHORT_UNITS = frozenset(["mm", "cm", "km", "in", "ft", "yd", "mi", "mg", "kg", "lb", "oz", "ml", "mL", "hr"])
r"""Two letters that are a unit outside of ``\text{}``; others are variables."""

# Commas of one number; "(1,200)" is a pair.
_GROUPED = re.compile(r"[^0-9,(\[{]*[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?[^0-9,(\[{]*")
_GROUPED_PART = re.compile(r"(?<![0-9,.])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9,])")
_BRACKET_OPENS = re.compile(r"(?<!\\)[(\[]|\\(?:\{|lbrace|langle)")
_BRACKET_CLOSES = re.compile(r"(?<!\\)[)\]]|\\(?:\}|rbrace|rangle)")

_TOKEN = re.compile(
    r"""
    (?P<skipped>  \s+ | ~ | \\[!,;:()\[\] ]
                | \\(?:left|right|displaystyle|quad|qquad|[bB]igg?[lrm]?)(?![a-zA-Z])
                | \\\Z | \\?[$%€£] | \\degree(?![a-zA-Z]) | \^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\}) )
  | (?P<ratio>    (?<!/)(?<!/[ ])(?!0[0-9])(?P<top>[0-9]+)\s*/\s*(?P<bottom>[1-9][0-9]*)
                  (?!\s*[\^_!/]|[.,]?[0-9]) )
  | (?P<number>   (?!0[0-9])
                  (?: [0-9]{1,3}(?:(?:,\s*\\!\s*|\{,\}\s*|\\[,;: ]|[ ~])[0-9]{3})+(?![0-9]|\s*/)(?:\.[0-9]+)?
                    | [0-9]+(?:\.[0-9]+)? | \.[0-9]+ ) )
  | (?P<fraction> \\(?:[dtc]|nice|s)?frac(?![a-zA-Z]) )
  | (?P<root>     \\sqrt(?![a-zA-Z])(?!\s*\[) )
  | (?P<script>   [_^] )
  | (?P<times>    \* | \\(?:cdot|times|ast)(?![a-zA-Z]) )
  | (?P<text>     """
    + _TEXT
    + r""" )
  | (?P<other>    \\(?:begin|end)\s*\{[a-z]*\} | \\[a-zA-Z]+ | \\. | . )
    """,
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_NOT_DIGITS = re.compile("[^0-9.]")
_ONE_DIGIT = re.compile(r"\s*(\\[a-zA-Z]+|\\.|.)", re.DOTALL)
_ALL_DIGITS = re.compile(r"\s*(\\[a-zA-Z]+|\\.|[0-9]+|.)", re.DOTALL)
_SYNONYMS = {
    r"\leq": r"\le",
    r"\geq": r"\ge",
    r"\leqslant": r"\le",
    r"\geqslant": r"\ge",
    r"\neq": r"\ne",
    r"\lbrace": r"\{",
    r"\rbrace": r"\}",
    r"\varnothing": r"\emptyset",
    **{
        rf"\{place}{{{name}}}": rf"\{place}{{pmatrix}}"
        for place in ("begin", "end")
        for name in ("bmatrix", "psmallmatrix", "bsmallmatrix")
    },
}
_OPENING = frozenset(["(", "[", "{", r"\{", ",", "&", r"\\", "=", r"\in"])
_OPEN, _CLOSE = frozenset(["(", "[", "{", r"\{"]), frozenset([")", "]", "}", r"\}"])
_SIGNS = frozenset(["+", "-", r"\pm"])
_EDGES = (
    _OPENING
    | _CLOSE
    | _SIGNS
    | {r"\lfloor", r"\rfloor", r"\lceil", r"\rceil"}
    | {r"\cup", r"\end{pmatrix}", r"\begin{pmatrix}"}
)
_TIMES = "*"
_FACTOR = re.compile(r"[a-zA-Z(]|\\(?!pm)[a-zA-Z]")

# "x =", "AB =", "\theta =", "x_1 =", "f(x) =", "(x,y) =", "x \in"
NAME = re.compile(
    r"(?:[a-zA-Z]{1,2}|\\(?:alpha|beta|gamma|delta|theta|phi|lambda|mu|omega))(?:_(?:.|\{[^{}]*\}))?(?:\((?:[a-zA-Z]|-?[0-9]+)\))?"
    r"|\((?:[a-z],)+[a-z]\)"
)

Part = str | int | Fraction
"""Number or other text of an answer."""


def normalize_answer(answer: str, *, grouped: bool = True, named: bool = False) -> str:
    r"""Return the normal form of an answer; it is empty if the answer is only units and signs.

    ``1,200`` is a number, or with ``grouped=False`` a list of two; ``1,\!200`` is always a number.
    With ``named``, the ``x =`` of ``x = 5`` stays.
    """
    text = answer.strip()
    if len(text) > MAX_LENGTH:
        return text
    if not text.isascii():
        text = _UNICODE_ROOT.sub(r"\\sqrt{\1}", text).translate(_UNICODE)
    while text.startswith("{") and closing_brace(text) == len(text) - 1:
        text = text[1:-1].strip()
    if r"\begin" not in text:  # undo double escaping; in a matrix, two backslashes end a row
        text = text.replace(r"\\", "\\")
    else:
        text = _ARRAY.sub(r"\\begin{pmatrix}\2\\end{pmatrix}", _ROW_END.sub(r"\\\\", text))
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    whole = _ALL_TEXT.fullmatch(text)
    if whole:
        text = whole[1].strip()
    if "and" in text:
        text = _AND.sub(", ", text)
    text = _without_units(text, is_text=whole is not None)
    if grouped and "," in text:
        text = _without_separators(text)
    parts = _read(text)
    if len(parts) > 1 and parts[-1] in (".", ",", ";", ":"):
        parts.pop()
    text = _write(_without_brackets(parts if named else _without_name(parts)))
    return text.lower() if _TITLE_CASE.fullmatch(text) else text


def _without_separators(text: str) -> str:
    r"""Drop thousands separators: ``1,200``, ``\frac{1,023}{1,024}``, ``1,200\sqrt{3}``.

    If a comma cannot be one, or is in brackets, as in the pair ``(1,200)``, all are those of a list.
    """
    if _GROUPED.fullmatch(text):
        return text.replace(",", "")
    found = list(_GROUPED_PART.finditer(text))
    before = [text[: number.start()] for number in found]
    if sum(number[0].count(",") for number in found) < text.count(",") or any(
        len(_BRACKET_OPENS.findall(part)) != len(_BRACKET_CLOSES.findall(part)) for part in before
    ):
        return text
    return text.replace(",", "")


def _without_units(text: str, *, is_text: bool) -> str:
    r"""Strip units: ``5\text{ cm}^2`` and ``5 dollars`` -> ``5``; keep words that are the answer."""
    while found := _LAST_WORDS.search(text):
        quantity = _LAST_SPACES.sub("", text[: found.start()])
        if not _QUANTITY.search(quantity) or quantity[-1] in "=<>+-(":
            break
        in_text, bare = found.groups()
        glued = len(quantity) == found.start()
        if (
            bare
            and not is_text
            and not all(word in _SHORT_UNITS or (len(word) > 2 and not glued) for word in _WORD.findall(bare))
        ):
            break
        words = (in_text or bare or "").replace(r"\degree", "").strip(" \t\n.,;()$~")
        if words and not is_unit(words):
            break
        text = quantity
    return text


def _read(text: str) -> list[Part]:
    """Return the numbers and other parts of an answer, in order."""
    parts: list[Part] = []
    position = 0
    while token := _TOKEN.match(text, position):
        kind, position = token.lastgroup, token.end()
        part: Part = token[0]
        if kind == "skipped":
            continue
        if kind == "text":
            parts += _read(token["words"])
            continue
        if kind == "number":
            part = _simplest(Fraction(_NOT_DIGITS.sub("", token[0])))
        elif kind == "ratio":
            part = _simplest(Fraction(int(token["top"]), int(token["bottom"])))
        elif kind == "fraction":
            top, position = _argument(text, position, _ONE_DIGIT)
            bottom, position = _argument(text, position, _ONE_DIGIT)
            part = _ratio(_read(top), _read(bottom))
            if isinstance(part, str) and part.startswith("-"):
                _append(parts, "-", is_fraction=False)
                part = part[1:]
        elif kind == "root":
            radicand, position = _argument(text, position, _ONE_DIGIT)
            part = rf"\sqrt{{{_write(_read(radicand))}}}"
        elif kind == "script":
            raised, position = _argument(text, position, _ALL_DIGITS)
            script = _write(_read(raised))
            part += script if len(script) == 1 else f"{{{script}}}"
        elif kind == "times":
            part = _TIMES
        elif part == "{" and (end := closing_brace(text, position - 1)):
            inside = _read(text[position:end])
            is_argument = parts and re.match(r"\\[a-zA-Z]|[\]}_^]", str(parts[-1]))
            position = end + 1
            if len(inside) != 1 or is_argument:
                parts += [part, *inside, "}"]
                continue
            part = inside[0]
        else:
            part = _SYNONYMS.get(part, part)
        _append(parts, part, is_fraction=kind in ("ratio", "fraction"))
    return _without_slashes(parts) if "/" in parts else parts


def _append(parts: list[Part], part: Part, *, is_fraction: bool) -> None:
    """Append ``part``, joining a mixed number and dropping signs that change nothing."""
    last = parts[-1] if parts else "("
    if part == "+" and isinstance(last, str) and (last in _OPENING or last.startswith(r"\begin")):
        return
    if not isinstance(part, str) and part < 0 and isinstance(last, str):
        if last == "+":
            parts.pop()
        if last == "+" or last in _OPENING or last.startswith(r"\begin"):
            parts.append("-")
            part = -part
    if part == r"\end{pmatrix}" and last == r"\\":
        parts.pop()
    if is_fraction and isinstance(part, Fraction) and 0 < part < 1 and type(last) is int and last > 0:
        parts[-1] = last + part
        return
    if last == _TIMES and len(parts) > 1 and isinstance(part, str) and _FACTOR.match(part):
        parts.pop()  # 9*\pi is 9\pi, but 2*3 is not 23
    elif type(last) is int and last == 1 and part == "i" and (len(parts) < 2 or parts[-2] in _EDGES):
        parts.pop()
    parts.append(part)


def _argument(text: str, position: int, token: re.Pattern[str]) -> tuple[str, int]:
    """Return the argument of a TeX command, without braces or brackets ("" if there is none), and its end."""
    found = token.match(text, position)
    if found is None:
        return "", len(text)
    if found[1] not in ("{", "("):
        return found[1], found.end()
    end = closing_brace(text, found.start(1), found[1])
    return ("", len(text)) if end is None else (text[found.end() : end], end + 1)


def _ratio(top: list[Part], bottom: list[Part]) -> Part:
    r"""Return the value of whole numbers; other fractions as text, ``\frac{-x}{2}`` as ``-\frac{x}{2}``."""
    top, bottom = _without_brackets(top), _without_brackets(bottom)
    numerator, denominator = _whole(top), _whole(bottom)
    if numerator is not None and denominator:
        return _simplest(Fraction(numerator, denominator))
    if top[:1] == ["-"] and len(top) > 1 and not _SIGNS & set(top[1:]):
        return "-" + str(_ratio(top[1:], bottom))
    return rf"\frac{{{_write(top)}}}{{{_write(bottom)}}}"


def _without_slashes(parts: list[Part]) -> list[Part]:
    r"""Write ``a/b`` as ``\frac{a}{b}`` where it is clear what is divided by what: not in ``x/2y``."""
    written: list[Part] = []
    rest = parts[::-1]
    while rest:
        part = rest.pop()
        if part == "/":
            bottom = _factor(rest, "(", ")")
            if not rest or rest[-1] in _EDGES:
                top: list[Part] = []
                while written and (written[-1] == ")" or written[-1] not in _EDGES):
                    top = _factor(written, ")", "(")[::-1] + top
                part = _ratio(top, bottom)
            else:
                rest += bottom[::-1]
        written.append(part)
    return written


def _factor(parts: list[Part], opening: str, closing: str) -> list[Part]:
    """Remove the last part, or the whole group that it opens, from ``parts``; return it."""
    taken: list[Part] = []
    depth = 1
    while parts and depth > 0:
        taken.append(parts.pop())
        depth += (taken[-1] == opening) - (taken[-1] == closing) - (len(taken) == 1)
    return taken


def _whole(parts: list[Part]) -> int | None:
    *sign, last = parts or [""]
    return (-last if sign else last) if type(last) is int and sign in ([], ["-"]) else None


def _simplest(value: Fraction) -> int | Fraction:
    return value.numerator if value.denominator == 1 else value


def _is_number(parts: list[Part]) -> bool:
    return len(parts) == 1 and not isinstance(parts[0], str)


def _without_name(parts: list[Part]) -> list[Part]:
    r"""Drop the variable of ``x = 5`` and ``x \in [1,2)``, not the left side of an equation."""
    for sign in ("=", r"\in"):
        if parts.count(sign) == 1 and "=" not in parts[parts.index(sign) + 1 :]:
            name = "".join(map(str, parts[: parts.index(sign)]))
            if NAME.fullmatch(name):
                return parts[parts.index(sign) + 1 :]
    return parts


def _without_brackets(parts: list[Part]) -> list[Part]:
    """Drop brackets around everything, as in ``(2)``, ``-(2)`` and ``{2}``, but those of a tuple."""
    if parts[:2] == ["-", "("] and parts[3:] == [")"] and _is_number(parts[2:3]):
        return ["-", parts[2]]
    closing = _CLOSING.get(str(parts[0])) if len(parts) > 2 else None
    if closing is None or parts[-1] != closing:
        return parts
    depth = 0
    for part in parts[:-1]:
        depth += (part in _OPEN) - (part in _CLOSE)
        if depth == 0 or (depth == 1 and part == ","):
            return parts
    return _without_brackets(parts[1:-1])


def _write(parts: Iterable[Part]) -> str:
    """Join parts; ``{}`` keeps neighbouring numbers apart, a space commands and letters."""
    text = ""
    last: Part = ""
    for part in parts:
        piece = part if isinstance(part, str) else _numeral(part)
        if not isinstance(part, str) and text and (not isinstance(last, str) or part < 0):
            text += "{}"
        elif piece[0].isalpha() and isinstance(last, str) and last[:1] == "\\" and last[-1].isalpha():
            text += " "
        text += ", " if part == "," else piece
        last = part
    return text


def _numeral(value: int | Fraction) -> str:
    if isinstance(value, int):
        return str(value)
    return rf"{'-' if value < 0 else ''}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"
