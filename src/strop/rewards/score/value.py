r"""Equality of answers by value, with sympy and the parser of math-verify (latex2sympy2-extended).

Answers are taken apart as far as their structure goes: alternatives, lists and sets (in any order), tuples,
intervals, unions, matrices and relations. What is left are expressions, which are equal if they are the same
number, or functions with equal values wherever they are real. Nothing is rounded.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from strop.rewards.score.normal_form import MAX_LENGTH, NAME, normalize_answer

_DIGITS, _CLOSE_TO = 250, 1e-200
"""Digits to which functions are evaluated, and the largest relative difference of equal values."""
_N_POINTS = 12

_WORD = r",?\s*(?:\\(?:text|textrm|mbox|mathrm)\s*\{{\s*,?\s*{0}\s*\}}|(?<![a-zA-Z\\{{]){0}(?![a-zA-Z]))"
_OR, _AND = (re.compile(_WORD.format(word)) for word in ("or", "and"))
_BASE = re.compile(r"\(([0-9A-F]+)\)_")
_SCIENTIFIC = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?)[eE]([-+]?[0-9]+)")
_SET_BUILDER = re.compile(r"\\\{[a-zA-Z](?:\\in ?\\mathbb\{?R\}?)?(?:\||:|\\mid)(.*(?:[<>]|\\[lg]e).*)\\\}")
_LABEL = re.compile(r"(?:[Oo]ption|[Cc]hoice)?\(?([A-J])[).:]?")
_PERCENT, _DEGREE = re.compile(r"%|percent"), re.compile(r"\\circ|°|degree")
_SYNONYMS = {
    **{word: word for word in ("yes", "no", "true", "false")},
    **dict.fromkeys(("nosolution", "nosolutions", "theemptyset", r"\{\}"), r"\emptyset"),
    **dict.fromkeys(("allrealnumbers", r"\mathbb{r}"), r"(-\infty, \infty)"),
}

_TOKEN = re.compile(r"\\(?:begin|end)\{[a-z]*\}|\\[a-zA-Z]+|\\.|.", re.DOTALL)
_OPENING = re.compile(r"[(\[{]|\\(?:\{|langle|begin.*)")
_CLOSING = re.compile(r"[)\]}]|\\(?:\}|rangle|end.*)")
_EXCLUDED = re.compile(
    r"\A(?:[a-zA-Z]\\ne ?|\\mathbb\{R\}(?:\\setminus|\\backslash)\\\{)([^,=<>}]+)(?:\\\})?\Z"
)
_JOINTS = (",", ";", r"\lor", r"\land")
_INEQUALITIES = ("<", ">", r"\le", r"\ge", r"\ne")
_MIRRORED = {"<": ">", r"\le": r"\ge"}
_VARIABLE = re.compile(r"[a-zA-Z]|\\(?:alpha|beta|gamma|theta|phi|lambda|mu|omega)")
_LETTER = re.compile(r"(?<![\\a-zA-Z])[a-df-zA-Z]")
_LETTERS = re.compile("[a-z]+")  # "no" is not the product "on"

_NUMBER = re.compile(r"-?(?:[0-9]+|\\frac\{[0-9]+\}\{[0-9]+\})")
_POWER_OF_TEN = re.compile(rf"(?:({_NUMBER.pattern})\*)?10\^\{{?(-?[0-9]{{1,4}})\}}?")
_SCRIPT = re.compile(r"([_^])([0-9a-zA-Z])")  # of one character: x^23 is x^2 * 3 in a normal form
_EXPRESSION = re.compile(
    r"(?:[0-9+\-*^(){}|! ]|\\sqrt\[[0-9n]\]|[a-z]_(?:[0-9a-z]|\{[0-9]+\})|\\log_(?:[0-9a-z]|\{[0-9]+\})"
    r"|(?<![a-zA-Z])(?!or)(?:[a-z]{1,2}|[a-z]?[A-Z]|[A-Z][a-z]|[abcxyz]{3})(?![a-zA-Z])"
    r"|\\(?:frac|sqrt|binom|pi|alpha|beta|gamma|delta|theta|phi|lambda|mu|omega|sigma|rho|log|ln|cot|sec|csc"
    r"|(?:arc)?(?:sin|cos|tan)|(?:sin|cos|tan)h|[lr](?:floor|ceil))(?![a-zA-Z]))+"
)


def same_value(found: str, expected: str) -> bool:
    r"""Return True if two answers have the same value: ``1+x`` and ``x+1``, ``3, 4`` and ``\{4, 3\}``.

    A number in ``expected`` must be that number in ``found``, in some notation: ``2+2`` is no answer for 4.
    The comparison may run for very long: every scorer runs under a deadline.
    """
    if max(len(found), len(expected)) > MAX_LENGTH:
        return False
    return _same_measure(found, expected) or any(
        _same(_form(found, grouped=grouped), _form(expected, grouped=grouped)) for grouped in (True, False)
    )


def _same_measure(found: str, expected: str) -> bool:
    r"""Return True for ``5\%`` and 0.05, ``90^\circ`` and ``\frac{\pi}{2}``, of which one has the sign."""
    forms = [_form(answer) for answer in (found, expected)]
    for sign, unit in ((_PERCENT, r"\frac{1}{100}"), (_DEGREE, r"\frac{\pi}{180}")):
        marked = [bool(sign.search(answer)) for answer in (found, expected)]
        measure, plain = forms[marked[1]], forms[marked[0]]
        if marked[0] == marked[1] or not _NUMBER.fullmatch(measure):
            continue
        if _NUMBER.fullmatch(plain) if sign is _PERCENT else r"\pi" in plain:
            return _equal_expressions(f"({measure})*{unit}", plain)
    return False


def _form(answer: str, *, grouped: bool = True) -> str:
    r"""Return the normal form with its name, and with ``\lor`` and ``\land`` for the words."""
    text = _SCIENTIFIC.sub(r"\1*10^{\2}", answer) if _SCIENTIFIC.fullmatch(answer) else answer
    text = _BASE.sub(r"\1_", text)
    text = normalize_answer(_AND.sub(r" \\land ", _OR.sub(r" \\lor ", text)), grouped=grouped, named=True)
    for pattern in (_SET_BUILDER, _LABEL):
        if match := pattern.fullmatch(text):
            text = match[1]
    return _SYNONYMS.get(text.lower(), text)


def _same(found: str, expected: str) -> bool:
    """Compare two normal forms."""
    if found == expected:
        return bool(found)
    sides = [_split(text, ("=", *_INEQUALITIES)) for text in (found, expected)]
    if any(set(signs) & set(_INEQUALITIES) for _, signs in sides):
        regions = [_region(text) for text in (found, expected)]
        if all(regions):
            return _matched(*regions, same=_same_interval)
    members, other_members = _members(found), _members(expected)
    if members or other_members:
        return bool(members and other_members) and _same_members(members, other_members)
    if all(signs for _, signs in sides) and _same_relations(*sides):
        return True
    (name, value), (other, other_value) = _named(found), _named(expected)
    if name or other:
        is_another = name != other and all(map(_VARIABLE.fullmatch, (name, other)))
        return not is_another and _same(value, other_value)
    return _same_structure(found, expected)


def _split(text: str, separators: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a text at separators outside of brackets; return the pieces and the separators."""
    pieces, between, depth = [""], [], 0
    for token in _TOKEN.findall(text):
        depth += bool(_OPENING.fullmatch(token)) - bool(_CLOSING.fullmatch(token))
        if depth == 0 and token in separators:
            between.append(token)
            pieces.append("")
        else:
            pieces[-1] += token
    return [piece.strip() for piece in pieces], between


def _brackets(text: str) -> tuple[str, str, str]:
    """Return the opening bracket, the content and the closing bracket, if they are around the whole text."""
    tokens = _TOKEN.findall(text)
    depths = itertools.accumulate(
        bool(_OPENING.fullmatch(token)) - bool(_CLOSING.fullmatch(token)) for token in tokens
    )
    if [depth == 0 for depth in depths] != [False] * (len(tokens) - 1) + [True]:
        return "", text, ""
    return tokens[0], "".join(tokens[1:-1]).strip(), tokens[-1]


def _named(text: str) -> tuple[str, str]:
    r"""Split ``x=5`` and ``x\in [1, 2)`` into name and value; the name is "" without one."""
    for sign in ("=", r"\in"):
        sides, _ = _split(text, (sign,))
        if len(sides) == 2 and NAME.fullmatch(sides[0].replace(", ", ",")):
            return sides[0], sides[1]
    return "", text


Members = tuple[list[str], frozenset[str]]
"""Members of a list or set, and what joins them."""


def _members(text: str) -> Members | None:
    r"""Return the members of a list, a set, a union of sets or a term with ``\pm``, if several."""
    pieces, joints = _split(text, _JOINTS)
    if not joints:
        sets = [_brackets(one) for one in _split(_named(text)[1], (r"\cup",))[0]]
        if all(opening == r"\{" for opening, _, _ in sets):
            pieces = [member for _, inside, _ in sets for member in _split(inside, (",", ";"))[0]]
    if r"\pm" in text:
        pieces = list(dict.fromkeys(itertools.chain.from_iterable(map(_both_signs, pieces))))
    return (pieces, frozenset(joints)) if len(pieces) > 1 else None


def _both_signs(text: str) -> list[str]:
    if text.count(r"\pm") != 1 or r"\mp" in text:
        return [text]
    plus = re.sub(r"(^|[=({,])\+", r"\1", re.sub(r"\\pm ?", "+", text))
    return [plus, re.sub(r"\\pm ?", "-", text)]


def _same_members(found: Members, expected: Members) -> bool:
    """Compare members in any order, but those of a sequence with dots and values of unnamed variables."""
    (one, joints), (other, other_joints) = found, expected
    everything = "".join(one + other)
    if any(sign in everything for sign in _INEQUALITIES) and joints != other_joints:
        return False
    names = [len({_named(member)[0] for member in members} - {""}) for members in (one, other)]
    if "dots" in everything or (max(names) > 1 and min(names) == 0):
        return len(one) == len(other) and all(map(_same, one, other))
    return _matched(one, other, same=_same)


def _matched(found: Sequence[Any], expected: Sequence[Any], *, same: Callable[[Any, Any], bool]) -> bool:
    """Return True if each member of one has an equal one of its own in the other."""
    left = list(found)
    for member in expected:
        match = next((number for number, one in enumerate(left) if same(one, member)), None)
        if match is None:
            return False
        del left[match]
    return not left


Interval = tuple[bool, str, str, bool]
"""Ends, and whether they belong to it."""


def _region(text: str) -> list[Interval]:
    """Return the intervals of inequalities in one variable, or of a union; [] for other answers."""
    value = _EXCLUDED.sub(r"(-\\infty, \1)\\cup(\1, \\infty)", _named(text)[1])
    intervals = [_interval(piece) for piece in _split(value, (r"\lor", r"\cup"))[0]]
    return [interval for interval in intervals if interval] if all(intervals) else []


def _interval(text: str) -> Interval | None:
    sides, signs = _split(text, ("=", *_INEQUALITIES))
    if not signs:
        opening, inside, closing = _brackets(text)
        ends, commas = _split(inside, (",",))
        if len(commas) != 1 or opening not in ("(", "[") or closing not in (")", "]"):
            return None
        return opening == "[", ends[0], ends[1], closing == "]"
    if set(signs) <= set(_MIRRORED.values()):
        sides, signs = sides[::-1], signs[::-1]
    elif not set(signs) <= set(_MIRRORED):
        return None
    closed = [sign in (r"\le", r"\ge") for sign in signs]
    variables = [number for number, side in enumerate(sides) if _VARIABLE.fullmatch(side)]
    if len(variables) != 1 or any(_LETTER.search(side) for side in sides if side != sides[variables[0]]):
        return None
    place = (len(sides), variables[0])
    if place == (2, 0):
        return False, r"-\infty", sides[1], closed[0]
    if place == (2, 1):
        return closed[0], sides[0], r"\infty", False
    return (closed[0], sides[0], sides[2], closed[1]) if place == (3, 1) else None


def _same_interval(found: Interval, expected: Interval) -> bool:
    return (found[0], found[3]) == (expected[0], expected[3]) and all(map(_same, found[1:3], expected[1:3]))


def _same_relations(found: tuple[list[str], list[str]], expected: tuple[list[str], list[str]]) -> bool:
    """Return True if two chains of equations and inequalities are equal but for factors and order."""
    return _matched(_relations(*found), _relations(*expected), same=_same_relation)


def _relations(sides: list[str], signs: list[str]) -> list[tuple[str, str, str]]:
    """Return sign, left and right side of each relation, with ``>`` for ``<``."""
    triples = zip(signs, sides, sides[1:], strict=False)
    return [
        (_MIRRORED[sign], right, left) if sign in _MIRRORED else (sign, left, right)
        for sign, left, right in triples
    ]


def _same_relation(found: tuple[str, str, str], expected: tuple[str, str, str]) -> bool:
    (sign, *sides), (other_sign, *other_sides) = found, expected
    parsed = [_parsed(side) for side in (*sides, *other_sides)]
    if sign != other_sign or any(side is None for side in parsed):
        return sign == other_sign and all(map(_same, sides, other_sides))
    one, other = parsed[0] - parsed[1], parsed[2] - parsed[3]
    if not one.free_symbols or one.free_symbols != other.free_symbols:
        return False
    ratios = [value / other_value for value, other_value in _values(one, other) if other_value]
    if len(ratios) < 3 or not (ratios[0] if sign in ("=", r"\ne") else ratios[0].is_positive):
        return False
    return all(abs(ratio / ratios[0] - 1) < _CLOSE_TO for ratio in ratios)


def _same_structure(found: str, expected: str) -> bool:
    r"""Compare unions, tuples, intervals and matrices entry by entry, and other answers as expressions."""
    for separators in ((r"\cup",), (r"\cap", r"\setminus"), (":",)):
        (one, joints), (other, other_joints) = (_split(text, separators) for text in (found, expected))
        if joints or other_joints:
            in_order = joints == other_joints and all(map(_same, one, other))
            return in_order or (separators[0] == r"\cup" and _matched(one, other, same=_same))
    (*brackets, one), (*other_brackets, other) = (
        (opening, closing, _split(inside, (",", "&", r"\\")))
        for opening, inside, closing in map(_brackets, (found, expected))
    )
    if one[1] or other[1]:
        return (brackets, one[1]) == (other_brackets, other[1]) and all(map(_same, one[0], other[0]))
    return _equal(found, expected)


def _equal(found: str, expected: str) -> bool:
    if not _NUMBER.fullmatch(expected):
        return not _LETTERS.fullmatch(expected) and _equal_expressions(found, expected)
    power = _POWER_OF_TEN.fullmatch(found)
    return power is not None and _fraction(power[1] or "1") * Fraction(10) ** int(power[2]) == _fraction(
        expected
    )


def _fraction(number: str) -> Fraction:
    return Fraction(re.sub(r"\\frac\{(\d+)\}\{(\d+)\}", r"\1/\2", number))


def _equal_expressions(found: str, expected: str) -> bool:
    one, other = _parsed(found), _parsed(expected)
    if one is None or other is None:
        return False
    if one == other:
        return True
    if one.free_symbols or other.free_symbols:
        values = _values(one, other)
        return len(values) > 2 and all(abs(a - b) <= _CLOSE_TO * abs(b) for a, b in values)
    difference = one - other  # its digits are computed until they are right, however small it is
    return not difference.is_Rational and bool(
        abs(difference.evalf(15, maxn=400)) <= abs(other.evalf()) * _CLOSE_TO
    )


def _values(one: Any, other: Any) -> list[tuple[Any, Any]]:
    """Return the values of two functions at fixed points; none if only one of them is real at a point.

    Without the imaginary unit, points at which both are complex are skipped.
    """
    import sympy

    chance = random.Random(0)
    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    complex_too = one.has(sympy.I) or other.has(sympy.I)
    values = []
    for number in range(_N_POINTS):
        bottom, signs = (1, [1]) if number % 4 == 0 else (7, [1, -1] if number % 4 > 1 else [1])
        point = {
            symbol: sympy.Rational(chance.choice(signs) * chance.randint(2, 40), bottom) for symbol in symbols
        }
        pair = [function.subs(point).evalf(_DIGITS) for function in (one, other)]
        if not all(value.is_number and value.is_finite for value in pair):
            continue
        are_real = [abs(sympy.im(value)) <= _CLOSE_TO * abs(value) for value in pair]
        if not complex_too and are_real[0] != are_real[1]:
            return []
        if complex_too or are_real[0]:
            values.append((pair[0], pair[1]))
    return values


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> Any:
    """Return a normal form as a sympy expression, None if it is not an expression that sympy computes."""
    import sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

    if not _EXPRESSION.fullmatch(text) or "{}" in text:
        return None
    try:
        expression = latex2sympy(
            _SCRIPT.sub(r"\1{\2}", text),
            is_real=None,
            convert_degrees=False,
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
    except Exception:  # noqa: BLE001 - the parser raises Exception itself for what it cannot read
        return None
    if not isinstance(expression, sympy.Expr):
        return None
    return expression.subs(sympy.Symbol("i"), sympy.I).doit()
