"""A preference with a known answer, to learn from comparisons alone: letters in alphabetical order.

A prompt is some letters, an answer is the same letters in any order, and of two answers the better one is
that with more pairs of letters in order. Nearly all answers have one length, so length tells nothing. A
reward model sees only which of two answers was preferred, sometimes wrongly; the truth is kept for measuring.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, permutations
from typing import Any

LETTERS = "abcdefghij"
PROMPT_LETTERS = 5
ANSWER_TOKENS = PROMPT_LETTERS + 3
"""Room for an end token, and for answers that are too long."""
DATA_SOURCE = "strop/letters"


def quality(letters: str, answer: str) -> int:
    """Pairs of ``letters`` that stand in order in ``answer``, less four for each letter that is too many.

    A letter that is left out loses its pairs. From -4 for each superfluous letter to 10 for five in order.
    """
    in_order = sum(
        first in answer and second in answer and answer.index(first) < answer.index(second)
        for first, second in combinations(sorted(letters), 2)
    )
    return in_order - 4 * (len(answer) - len(set(answer) & set(letters)))


def preference(letters: str, answer: str, other: str) -> float:
    """1.0 when ``answer`` is better than ``other``, 0.5 when neither is better, 0.0 when it is worse."""
    difference = quality(letters, answer) - quality(letters, other)
    return 0.5 if difference == 0 else float(difference > 0)


def all_prompts(generator: random.Random) -> list[str]:
    """Every prompt that there is, 30,240 of them, in random order."""
    prompts = ["".join(letters) for letters in permutations(LETTERS, PROMPT_LETTERS)]
    generator.shuffle(prompts)
    return prompts


def demonstrate(letters: str, generator: random.Random) -> str:
    """An answer of mixed quality: complete, and more or less in order."""
    disorder = generator.choice((6, 14))
    return "".join(sorted(letters, key=lambda letter: LETTERS.index(letter) + generator.uniform(0, disorder)))


def compare(
    prompts: Sequence[str],
    answers: Sequence[Sequence[str]],
    *,
    wrong: float,
    generator: random.Random,
) -> Iterator[dict[str, Any]]:
    """Two of the answers to each prompt as rows with ``chosen`` and ``rejected``; ``wrong`` is their share
    whose label is turned round. Prompts whose answers are all equally good are left out.
    """
    for letters, group in zip(prompts, answers, strict=True):
        pairs = [(a, b) for a, b in combinations(group, 2) if quality(letters, a) != quality(letters, b)]
        if not pairs:
            continue
        better, worse = sorted(generator.choice(pairs), key=lambda answer: -quality(letters, answer))
        if generator.random() < wrong:
            better, worse = worse, better
        yield prompt_row(letters) | {"chosen": better, "rejected": worse}


def prompt_row(letters: str) -> dict[str, Any]:
    """What every row of a data set has."""
    return {"data_source": DATA_SOURCE, "prompt": [{"role": "user", "content": letters}]}
