"""Words beside an answer: those that are its unit, and those that hedge or add a second answer."""

from __future__ import annotations

import re

_WORDS = """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
    sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety
    hundred hundreds thousand thousands million millions billion billions trillion trillions dozen
    dozens half halves third thirds fourth fourths fifth fifths sixth sixths seventh sevenths eighth
    eighths ninth ninths tenth tenths hundredth hundredths thousandth thousandths tens mn mil mln
    bil bn tn k grand lakh crore pi double triple twice squared cubed factorial doubled tripled
    plus minus divided multiplied power equals mod
    or and nor to till until through versus vs either neither both between but under above
    below than at up if unless except instead rather otherwise alternatively also then else off
    maybe perhaps possibly probably likely might may could should would approximately approx about
    around roughly nearly almost circa ca ish presumably apparently supposedly hopefully estimated
    guess think not no isn't never is are was were be it i we wait actually unknown unsure wrong
    incorrect false am pm
"""
_NOT_UNITS = frozenset(_WORDS.split())
"""Numbers and arithmetic; words of a further answer, a range, a condition, a doubt or a sentence."""
_SYMBOLS = frozenset("msghlLACFJNVW")
"""Units of one letter; ``5 M`` or ``5 k`` is another number, ``5 x`` another term."""

_WORD = r"[^\W\d_]+(?:[.'’][^\W\d_]+)*\.?(?:\^?\{?[23]\}?|[²³])?"
_PHRASE = re.compile(rf"(?:/\s?)?{_WORD}(?:(?:\s?[/·-]\s?|\s+){_WORD}){{0,5}}")
_LETTERS = re.compile(r"[^\W\d_][^\W\d_.'’]*(?:[.'’][^\W\d_]+)*")

JOINING = (
    r"(?:or|and|nor|but|no|rather|actually|wait|possibly|perhaps|maybe|probably|alternatively|otherwise)\b"
)
"""Pattern of a word that continues an answer with another one."""


def is_unit(text: str) -> bool:
    """Return True if ``text`` can be the unit of a number: ``apples``, ``square feet``, ``km/h``, ``cm^2``.

    At most six words, none of them a number, a conjunction, a comparison, a hedge or a verb of a sentence; no
    digit but the exponents 2 and 3.
    """
    if not _PHRASE.fullmatch(text):
        return False
    words = _LETTERS.findall(text)
    return all(
        word in _SYMBOLS if len(word) == 1 else word.lower().replace(".", "") not in _NOT_UNITS
        for word in words
        if word != "a"
    )
