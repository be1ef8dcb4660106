r"""Spellings of real answers: right ones, which must score, and wrong ones, which must not.

A kind of spelling is a pair: a function that returns the fields of a ground truth (None where the kind does
not apply), and templates, of which one is drawn. ``<t>`` is the truth, ``<o>`` a random other number, ``<d>``
a random digit from 2 to 9. No part of the scorers is used.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

Fields = Callable[[str], dict[str, Any] | None]
Kinds = Mapping[str, tuple[Fields, Sequence[str]]]


class Mutation(NamedTuple):
    kind: str
    response: str
    truth: str


def mutations(
    kinds: Kinds, truths: Sequence[str], count: int, *, around: Sequence[str], seed: int = 0
) -> Iterator[Mutation]:
    """Yield ``count`` spellings, all kinds in turn, each of a random truth that it applies to.

    ``around`` are templates of whole responses, with ``<answer>``; a template may be a ``RESPONSE:`` itself.
    """
    chance = random.Random(seed)
    truths = sorted(set(truths))
    applicable = {
        kind: [truth for truth in truths if fields_of(truth) is not None]
        for kind, (fields_of, _) in kinds.items()
    }
    for kind in itertools.islice(itertools.cycle(kinds), count):
        fields_of, templates = kinds[kind]
        truth = chance.choice(applicable[kind])
        fields = {"t": truth, "o": _other_number(truth, chance), "d": chance.randint(2, 9)} | fields_of(truth)
        answer = _filled(chance.choice(templates), fields)
        if not answer.startswith("RESPONSE:"):
            answer = chance.choice(around).replace("<answer>", answer)
        yield Mutation(kind, answer.removeprefix("RESPONSE:"), truth)


def _filled(template: str, fields: Mapping[str, Any]) -> str:
    return re.sub(r"<(\w+)>", lambda found: str(fields[found[1]]), template)


def _other_number(truth: str, chance: random.Random) -> int:
    number = value(truth)
    other = int(10**4 if number is None else number)
    other += chance.choice([-1, 1]) * chance.choice([1, 2, 3, 7, 10, 100, 1000])
    return other if other != number else other + 1


# Fields of a truth.

_FRACTION = re.compile(r"(-?)\\[dtc]?frac\s*(?:\{([0-9]+)\}|([0-9]))\s*(?:\{([0-9]+)\}|([0-9]))")
_TUPLE = re.compile(r"(?:\\left)?\((?P<inside>[^()\[\]]*?,[^()\[\]]*?)(?:\\right)?\)")


@functools.cache
def value(truth: str) -> Fraction | None:
    r"""Return the value of a number as the data sets write it: ``-5``, ``1,\!200``, ``\frac{1}{2}``."""
    if found := _FRACTION.fullmatch(truth):
        return Fraction(int(found[2] or found[3]), int(found[4] or found[5])) * (-1 if found[1] else 1)
    if re.fullmatch(r"-?[0-9]{1,3}(?:,\\! ?[0-9]{3})+|-?[0-9]+|-?[0-9]*\.[0-9]+", truth):
        return Fraction(re.sub(r"[,\\! ]", "", truth))
    return None


def anything(truth: str) -> dict[str, Any] | None:
    return {}


def no_equation(truth: str) -> dict[str, Any] | None:
    return None if "=" in truth or "in" in truth else {}


def number(truth: str) -> dict[str, Any] | None:
    return None if value(truth) is None else {}


def no_zero(truth: str) -> dict[str, Any] | None:
    return None if value(truth) == 0 else {}


def nonzero(truth: str) -> dict[str, Any] | None:
    return {"negated": truth[1:] if truth.startswith("-") else f"-{truth}"} if value(truth) else None


def whole(truth: str) -> dict[str, Any] | None:
    number = value(truth)
    if number is None or number.denominator > 1 or _FRACTION.fullmatch(truth):
        return None
    n = int(number)
    near = {"less": n - 1, "more": n + 1, "three_less": n - 3}
    return near | {"n": n, "square": n * n, "twice": 2 * n, "size": abs(n)}


def above(least: int) -> Fields:
    """Whole numbers from ``least`` on."""
    return lambda truth: fields if (fields := whole(truth)) and fields["n"] >= least else None


def negative(truth: str) -> dict[str, Any] | None:
    return fields if (fields := whole(truth)) and fields["n"] < 0 else None


def thousands(truth: str) -> dict[str, Any] | None:
    fields = whole(truth)
    if not fields or fields["size"] < 1000:
        return None
    signs = {"comma": ",", "braces": "{,}", "thin": r"\,", "tex": r",\!"}
    return fields | {name: f"{fields['n']:,}".replace(",", sign) for name, sign in signs.items()}


def two_digits(truth: str) -> dict[str, Any] | None:
    return fields | {"split": f"{truth[:-1]},{truth[-1]}"} if (fields := above(10)(truth)) else None


def ratio(truth: str) -> dict[str, Any] | None:
    """Proper and improper fractions, of which ``truth`` may have a sign."""
    number = value(truth)
    if number is None or number.denominator == 1 or not _FRACTION.fullmatch(truth):
        return None
    top, bottom = abs(number.numerator), number.denominator
    return {
        "s": "-" if number < 0 else "",
        "a": top,
        "b": bottom,
        "a1": top + bottom + 1,
        "aa": 6 * top,
        "bb": 6 * bottom,
        "w": top // bottom,
        "r": top % bottom,
        "percent": f"{100 * top / bottom:g}",
        "rounded": f"{top / bottom:.4f}",
        "long": f"{top / bottom:.8f}",
    }


def _ratio_if(condition: Callable[[dict[str, Any]], bool]) -> Fields:
    return lambda truth: fields if (fields := ratio(truth)) and condition(fields) else None


def decimal(truth: str) -> dict[str, Any] | None:
    if not re.fullmatch(r"[0-9]*\.[0-9]+", truth):
        return None
    return {"a": Fraction(truth).numerator, "b": Fraction(truth).denominator}


def exact_decimal(truth: str) -> dict[str, Any] | None:
    fields = ratio(truth)
    if not fields or 1000 % fields["b"]:
        return None
    return fields | {"decimal": f"{fields['a'] / fields['b']:g}"}


def changed(pattern: str, *replacements: str) -> Fields:
    """Truths that match a pattern, with it replaced: fields ``c0``, ``c1``, ..."""

    def fields(truth: str) -> dict[str, Any] | None:
        if not re.search(pattern, truth):
            return None
        return {f"c{i}": re.sub(pattern, replacement, truth) for i, replacement in enumerate(replacements)}

    return fields


def pair(truth: str) -> dict[str, Any] | None:
    r"""Tuples and open intervals, without ``\left`` and ``\right``."""
    found = _TUPLE.fullmatch(truth)
    if not found:
        return None
    entries = [entry.strip() for entry in found["inside"].split(",")]
    fields = {"inside": ",".join(entries), "swapped": ",".join(entries[::-1]), "fewer": ",".join(entries[1:])}
    return fields if entries != entries[::-1] else None


# fmt: off
# GSM8K: truths are whole numbers.

GSM8K_AROUND = ["So it is.\n#### <answer>", "3 * 4 = 12\n12 - 2 = 10\n#### <answer>", "#### <answer>"]

GSM8K_RIGHT: Kinds = {
    "as it is": (anything, ["<t>"]),
    "trailing zeros": (anything, ["<t>.0", "<t>.00"]),
    "thousands separators": (thousands, ["<comma>", "<comma>.00", "$<comma>", "<comma> people"]),
    "currency": (above(0), ["$<t>", r"\$<t>", "$<t>.00", "€<t>", "$ <t>", "$<t>$", "<t> USD"]),
    "units": (anything, ["<t> apples", "<t> square feet", "<t> hours.", "<t>cm", "<t> km/h",
        "<t> miles per hour"]),
    "percent": (anything, ["<t>%", "<t> %", "<t> percent", r"<t>\%"]),
    "full stop": (anything, ["<t>."]),
    "markup": (anything, ["**<t>**", "**<t> apples**.", "`<t>`", r"\boxed{<t>}", "(<t>)"]),
    "plus": (above(0), ["+<t>", "+ <t>", "+$<t>"]),
    "minus": (negative, ["−<size>", "- <size>", "-$<size>", "$-<size>"]),
    "white space": (anything, ["  <t>", "\t<t>", "<t> ", "<t>\n", "<t>\n\n", "<t>\r\n"]),
    "an earlier marker": (anything, ["<o>\nNo, wait.\n#### <t>"]),
    "text in the next line": (anything, ["<t>\nThis is the answer.", "<t>\n\nShe is happy."]),
}

GSM8K_WRONG: Kinds = {
    "another number": (anything, ["<o>"]),
    "off by one": (whole, ["<less>", "<more>"]),
    "sign": (above(1), ["-<t>", "−<t>", "- <t>", "-$<t>"]),
    "longer number": (above(1), ["<t>0", "1<t>", "<t>.5", "<t>.01", "<t>,000"]),
    "broken separators": (two_digits, ["<split>", "<split>0", "<t>,0", "<t>,00"]),
    "or, and": (anything, ["<t> or <o>", "<t> and <o>", "<t> or maybe <o>", "<o> or <t>",
        "either <t> or <o>"]),
    "lists": (anything, ["<t>, <o>", "<o>, <t>", "<t>; <o>", "<t> / <o>", "<t> | <o>", "<t> <o>",
        "**<t>, <o>**", "**<t>** <o>"]),
    "ranges": (anything, ["<t>-<o>", "<t> - <o>", "<t>–<o>", "<t> to <o>", "<t>..<o>",
        "<t>~<o>", "<t>—<o>"]),
    "arithmetic": (anything, ["<t> + <d>", "<t> - <d>", "<t>*<d>", "<t>/<d>", "<t> x <d>", "<t>^<d>",
        "<t> × <d>"]),
    "right if computed": (whole, ["<three_less> + 3", "<twice>/2", "<less>+1", "<twice> ÷ 2"]),
    "equations": (anything, ["<t> = <o>", "<t>=<o>", "<t> != <o>", "<t> < <o>", "<o> = <t>"]),
    "number words": (anything, ["<t> thousand", "<t> million", "<t> dozen", "<t> hundred", "<t> and a half"]),
    "exponents": (above(1), ["<t>e3", "<t>E5", "<t>k", "<t>K", "<t>M", "<t> k", "<t>^3"]),
    "times": (anything, ["<t>:30", "<t>:00", "<t>:15 pm"]),
    "words for another": (anything, ["<t> or eleven", "<t> or more", "<t> or so", "<t> (or not)"]),
    "hedges": (anything, ["<t> maybe", "<t> probably", "<t> is wrong", "<t>?", "<t> at least",
        "<t>, not <o>"]),
    "last marker unreadable": (anything, [f"<t>\n#### {last}" for last in ("none", "", "unknown", "?",
        "ten")]),
    "last marker wrong": (anything, ["<t>\n#### <o>", "<t> #### <o>"]),
    "goes on": (anything, ["<t>\nor <o>", "<t>\nand <o>", "<t>\n<o>", "<t>\n\nOr rather <o>"]),
}

GSM8K_FLEXIBLE_RIGHT: Kinds = {
    **GSM8K_RIGHT,
    "in a sentence": (anything, ["RESPONSE:The answer is <t>.", "RESPONSE:She has <t> apples",
        "RESPONSE:**<t>**"]),
    "after arithmetic": (whole, ["RESPONSE:<more> - 1 = <t>", "RESPONSE:<three_less>+3=<t>"]),
}
GSM8K_FLEXIBLE_WRONG: Kinds = {
    **{kind: GSM8K_WRONG[kind] for kind in ("another number", "off by one", "sign", "longer number",
        "broken separators", "last marker wrong", "goes on")},
    "or, and": (anything, ["<t> or <o>", "<t> and <o>"]),
}


# MATH: truths are LaTeX.

MATH_AROUND = [
    r"So $\boxed{<answer>}$.", r"\[\boxed{<answer>}\]", r"Thus the answer is \boxed{<answer>}",
    r"$$x=\boxed{<answer>}$$ and $\{so on\}$",
]
_SHORT = r"\\[dtc]?frac\{(\d)\}\{(\d)\}"

MATH_RIGHT: Kinds = {
    "as it is": (anything, ["<t>"]),
    "trailing zeros": (whole, ["<n>.0", "<n>.00"]),
    "zeros of a decimal": (decimal, ["<t>0", "<t>00"]),
    "thousands separators": (thousands, ["<comma>", "<tex>", "<braces>", "<thin>", "<n>"]),
    "currency": (above(0), [r"\$<t>", r"\$<t>.00", "€<t>", r"<t>\$"]),
    "units in text": (number, [r"<t>\text{ cm}", r"<t>\,\text{cm}^2", r"<t> \mathrm{ kg}",
        r"<t>\ \text{m}", r"<t>\text{ square units}", r"<t>\mbox{ inches}^3", r"<t>\text{ km/h}",
        r"<t>\textrm{ ways.}"]),
    "units in words": (whole, ["<t> dollars", "<t> cm", "<t> square feet", "<t> apples",
        "<t> miles per hour"]),
    "degrees": (number, [r"<t>^\circ", r"<t>^{\circ}", "<t>°", r"<t>^{ \circ }", r"<t>\text{ degrees}"]),
    "percent": (number, [r"<t>\%", "<t>%", r"<t> \%", r"<t>\text{ percent}"]),
    "dfrac, tfrac": (changed(r"\\[dtc]?frac(?=\{|[0-9])", r"\\dfrac", r"\\tfrac", r"\\cfrac", r"\\frac"),
        ["<c0>", "<c1>", "<c2>", "<c3>"]),
    "frac without braces": (changed(_SHORT, r"\\frac\1\2", r"\\frac \1 \2", r"\\frac{\1}\2",
        r"\\frac\1{\2}"), ["<c0>", "<c1>", "<c2>", "<c3>"]),
    "slashes": (ratio, ["<s><a>/<b>", "<s><a> / <b>"]),
    "slash under roots and pi": (changed(r"^\\frac\{([0-9]*\\(?:pi|sqrt\{[0-9]+\}))\}\{([0-9]+)\}$",
        r"\1/\2"), ["<c0>"]),
    "spaces": (changed(r"(?<=[0-9a-z)}])([-+=]|,(?!\\!|[0-9]{3}))(?=[0-9a-z(\\])", r" \1 ", r"\\ \1\\ ",
        r"\\,\1\\;", r"~\1~"), ["<c0>", "<c1>", "<c3>", " <t> "]),
    "left, right": (changed(r"(?<![\\a-z])([(\[])(.*[^\\])([)\]])", r"\\left\1\2\\right\3",
        r"\\left\1 \2 \\right\3"), ["<c0>", "<c1>"]),
    "no left, right": (changed(r"\\left|\\right", ""), ["<c0>"]),
    "cdot, times": (changed(r"(?<=[0-9])\s*(?=\\(?:pi|sqrt))|(?<=[0-9])(?=[xyz])", r"\\cdot ",
        r" \\times ", "*"), ["<c0>", "<c1>", "<c2>"]),
    "plus": (above(0), ["+<t>", "+ <t>"]),
    "minus": (changed("-", "−", "–", "- "), ["<c0>", "<c1>", "<c2>"]),
    "sign of a fraction": (_ratio_if(lambda f: f["s"] == "-"), [r"\frac{-<a>}{<b>}", r"\frac{<a>}{-<b>}",
        r"-\frac{<a>}{<b>}"]),
    "parentheses": (number, ["(<t>)", r"\left(<t>\right)", "{<t>}", "( <t> )"]),
    "unreduced fractions": (ratio, [r"<s>\frac{<aa>}{<bb>}", "<s><aa>/<bb>", r"<s>\dfrac{<aa>}{<bb>}"]),
    "mixed numbers": (_ratio_if(lambda f: f["a"] > f["b"]), [r"<s><w>\frac{<r>}{<b>}",
        r"<s><w> \frac{<r>}{<b>}", "<s><w> <r>/<b>", r"<s><w>\tfrac{<r>}{<b>}"]),
    "exact decimals": (exact_decimal, ["<s><decimal>", "<s><decimal>0"]),
    "fractions for decimals": (decimal, [r"\frac{<a>}{<b>}", "<a>/<b>"]),
    "x = 5": (no_equation, ["x = <t>", "n=<t>", "AB = <t>", "x_1 = <t>", "f(x) = <t>", r"\theta = <t>"]),
    "roots without braces": (changed(r"\\sqrt\{(\d)\}", r"\\sqrt\1", r"\\sqrt \1"), ["<c0>", "<c1>"]),
    "full stop, dollars": (anything, ["<t>.", "$<t>$", r"\(<t>\)"]),
    "words": (changed(r"^\\text\{([A-Za-z]+)\}$", r"\1", r"\\textbf{\1}", r"\\mathrm{\1}"), ["<c0>",
        "<c1>", "<c2>"]),
    "tuples": (pair, ["(<inside>)", r"\left(<inside>\right)", r"\left( <inside> \right)"]),
    "matrices": (changed(r"\s*(\\\\|&)\s*", r" \1 ", r"\1"), ["<c0>", "<c1>"]),
    "arrays": (changed(r"^\\begin\{pmatrix\}(.*)\\end\{pmatrix\}$", r"\\begin{bmatrix}\1\\end{bmatrix}",
        r"\\left(\\begin{array}{ccc}\1\\end{array}\\right)", r"\\begin{pmatrix}\1 \\\\ \\end{pmatrix}"),
        ["<c0>", "<c1>", "<c2>"]),
    "fractions in matrices": (changed(r"(?<=[ }&])(-?[0-9]+)/([0-9]+)(?= )", r"\\frac{\1}{\2}"), ["<c0>"]),
    "lists with and": (changed(r"^(-?[0-9]+(?:, ?-?[0-9]+)*), ?(-?[0-9]{1,2})$", r"\1\\text{ and }\2"),
        ["<c0>"]),
    "boxes": (anything, [r"RESPONSE:First \boxed{<o>1}, no: \boxed{<t>}",
        r"RESPONSE:$\boxed{<t>}$, so \boxed{<t>}.", r"RESPONSE:$\fbox{<t>}$", r"RESPONSE:\boxed {<t>}",
        "RESPONSE:\\boxed{\n<t>\n}"]),
    "box without braces": (whole, [r"RESPONSE:$\boxed <n>$ is it"]),
}

MATH_WRONG: Kinds = {
    "another number": (anything, ["<o>", "<o>.5"]),
    "off by one": (whole, ["<less>", "<more>"]),
    "sign": (nonzero, ["<negated>"]),
    "another fraction": (_ratio_if(lambda f: f["a"] != 1), [r"<s>\frac{<b>}{<a>}", r"<s>\frac{<a1>}{<b>}",
        "<s><a>", "<s><a>:<b>"]),
    "rounded decimals": (_ratio_if(lambda f: 10**8 % f["b"] != 0), ["<s><rounded>", "<s><long>",
        r"<s><percent>\%"]),
    "longer number": (above(1), ["<t>0", "<t>.5", "1<n>", "<t> <d>", "<n>,000", r"<n>\frac12"]),
    "or, and": (anything, [r"<t>\text{ or }<o>", r"<o>\text{ and }<t>", "<t> or <o>", "<t> and <o>",
        r"<t>\mbox{ or }<o>", r"<t>\text{ or <o>}", r"\text{<t> or <o>}", r"<t>\lor <o>"]),
    "lists": (anything, ["<t>, <o>", "<o>, <t>", "<t>; <o>", "<t>/<o>", "<t>|<o>", r"<t> \quad <o>",
        r"\{<t>, <o>\}"]),
    "ranges": (anything, ["<t>-<o>", "<t>–<o>", r"<t>\text{ to }<o>", r"<t> \sim <o>",
        r"<t>, \ldots, <o>"]),
    "inequalities": (anything, [r"\neq <t>", r"\ne <t>", "<<t>", "> <t>", r"\geq <t>", "x > <t>",
        r"x \le <t>", r"\approx <t>"]),
    "equations": (no_equation, ["<o> = <t>", "<o>=<t>", "<t> = <t>", "<t> = <o>"]),
    "arithmetic": (no_zero, ["<t> + <d>", "<t> - <d>", r"<t> \cdot <d>", r"<t> \times <d>", "<t>/<d>",
        "<t>^<d>", r"\frac{<t>}{<d>}"]),
    "right if computed": (above(2), ["<three_less> + 3", r"1 \cdot <n>", r"\sqrt{<square>}",
        "<twice> - <n>", "1*<n>"]),
    "number words": (number, [r"<t>\text{ million}", r"<t>\text{ thousand}", "<t> million",
        r"<t>\text{ dozen}", r"<t>\mbox{ hundred}", r"<t>\text{ and a half}"]),
    "exponents": (above(2), ["<n>e3", r"<n> \times 10^3", "<n>^2", "<n>^{10}", "<n>E5", "<n>!",
        r"<n>\text{k}"]),
    "times": (whole, ["<n>:30", "<n>:00", r"<n>\text{:}30"]),
    "variables": (nonzero, ["<t>x", "<t> y", "<t>i", r"<t>\pi", r"<t>\sqrt{2}"]),
    "bases": (whole, ["<n>_2", "<n>_{16}"]),
    "hedges": (anything, [r"<t>\text{ (maybe)}", r"<t>\text{ probably}", r"<t>\text{ is wrong}",
        r"<t>, \text{possibly } <o>", "<t> (or not)", "<t>?", r"\text{not }<t>", r"<t>\text{ or so}",
        r"<t>\text{ at least}", r"\pm <t>"]),
    "order of a tuple": (pair, ["(<swapped>)"]),
    "brackets": (pair, ["[<inside>]", r"\{<inside>\}", "(<inside>]", "<inside>"]),
    "missing and further entries": (pair, ["(<fewer>)", "(<inside>, <o>)", "(<inside>) , <o>"]),
    "entry of a matrix": (changed(r"(pmatrix\} *-?)(?=[0-9])", r"\g<1>7"), ["<c0>"]),
    "boxes": (anything, [r"RESPONSE:$\boxed{<t>}$, no: $\boxed{<o>}$", r"RESPONSE:$\boxed{<t>}$, \boxed{}",
        r"RESPONSE:$\boxed{<t>}$ \boxed{<t>", r"RESPONSE:\boxed{<o>\boxed{<t>}}",
        r"RESPONSE:\boxed{\text{<o> or }\boxed{<t>}}", r"RESPONSE:The answer is $<t>$.",
        r"RESPONSE:\boxed{} <t>"]),
}


# Multiple choice: truths are labels.

# fmt: on
def label(truth: str) -> dict[str, Any] | None:
    """The label itself in lower case, and another one: the next."""
    return {"lower": truth.lower(), "x": "ABCD"["ABCD".index(truth) - 1]}


# fmt: off
CHOICE_AROUND = ["Answer: <answer>", "I think so.\n\nAnswer: <answer>", "**Answer:** <answer>",
    "The answer is <answer>"]

CHOICE_RIGHT: Kinds = {
    "as it is": (label, ["<t>", "<t>.", "(<t>)", "(<t>).", "**<t>**", "[<t>]", '"<t>"', "<t>\n"]),
    "boxes": (label, [r"\boxed{<t>}", r"$\boxed{\text{<t>}}$"]),
    "label alone": (label, ["RESPONSE:<t>", "RESPONSE:(<t>)", "RESPONSE:<t>.", "RESPONSE: <t>\n"]),
    "with the ending": (label, ["<t>. A man sits down.", "(<t>) he sits down.", "<t>: sits down.",
        "<t>.\nHe sits down.", "<t> - he sits down.", "<t> because he sits down."]),
    "names": (label, ["option <t>", "Option (<t>).", "`<t>`", r"\textbf{<t>}"]),
    "after an explanation": (label, ["RESPONSE:<x> makes no sense, <t> does.\nAnswer: <t>"]),
    "an earlier answer": (label, ["RESPONSE:Answer: <x>\nNo, wait.\nAnswer: <t>"]),
    "text in the next line": (label, ["<t>\n<x> would be odd.", "<t>\n\nI am sure."]),
}

CHOICE_WRONG: Kinds = {
    "another label": (label, ["<x>", "(<x>)", "<x>."]),
    "or, and": (label, ["<t> or <x>", "<t> and <x>", "(<t>) or (<x>)", "<x> or <t>", "either <t> or <x>"]),
    "lists": (label, ["<t>, <x>", "<t>/<x>", "<t>; <x>", "<t> & <x>", "<t> <x>", "(<t>)(<x>)", "<t><x>",
        "<t>-<x>", "<t> | <x>", "<t> - <x>", "<t>, E", "option <t> or option <x>"]),
    "hedges": (label, ["<t>, possibly <x>", "<t>, maybe <x>", "<t>, or <x>", "<t> (or <x>)",
        "<t>, but could be <x>", "<t>. Or <x>.", "<t>; perhaps <x>", "<t> (maybe <x>)", "<t>, or another",
        "<t>. Possibly <x>"]),
    "goes on": (label, ["<t>\nor <x>", "<t>\nOr maybe <x>", "<t>\n<x>", "<t>\n\nor (<x>)",
        "<t>.\nPossibly <x>", "<t>,\n<x>", "<t>\n- <x>", "<t>\n& <x>", "<t>\nOption <x>"]),
    "last mark wrong": (label, ["<t>\nAnswer: <x>", "<t>. The answer is <x>."]),
    "last mark unreadable": (label, ["<t>\nAnswer: none", "<t>\nAnswer:", "<t>\nThe answer is unclear.",
        "<t>\nAnswer: ?"]),
    "words": (label, ["<t>anoe", "<t>2", "not <t>", "<lower>", "A, B, C, D", "ABCD", "none of A, B, C, D"]),
    "no mark": (label, ["RESPONSE:I would choose <t> here", "RESPONSE:<t> or <x>", "RESPONSE:A B C D"]),
}
