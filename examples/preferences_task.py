"""Preference task with a known ground truth: letters in alphabetical order.

A prompt is a set of letters and an answer is the same letters in any order; the answer with more letter
pairs in alphabetical order is better. Nearly all answers have the same length, so length carries no signal.
The reward model is trained on noisy pairwise labels only; the ground truth serves evaluation.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, permutations
from typing import Any

LETTERS = "abcdefghij"
PROMPT_LETTERS = 5
ANSWER_TOKENS = PROMPT_LETTERS + 3
"""Response limit: leaves room for the end token and for superfluous letters."""
DATA_SOURCE = "strop/letters"


def quality(letters: str, answer: str) -> int:
    """Count the pairs of ``letters`` in alphabetical order, minus 4 per superfluous letter of ``answer``.

    A missing letter loses its pairs. Five letters in order score the maximum of 10.
    """
    in_order = sum(
        first in answer and second in answer and answer.index(first) < answer.index(second)
        for first, second in combinations(sorted(letters), 2)
    )
    return in_order - 4 * (len(answer) - len(set(answer) & set(letters)))


def preference(letters: str, answer: str, other: str) -> float:
    """Return 1.0 if ``answer`` is better than ``other``, 0.5 if they tie and 0.0 if it is worse."""
    difference = quality(letters, answer) - quality(letters, other)
    return 0.5 if difference == 0 else float(difference > 0)


def all_prompts(generator: random.Random) -> list[str]:
    """Return all 30,240 prompts in random order."""
    prompts = ["".join(letters) for letters in permutations(LETTERS, PROMPT_LETTERS)]
    generator.shuffle(prompts)
    return prompts


def demonstrate(letters: str, generator: random.Random) -> str:
    """Return an answer with every letter, partly in order: a demonstration of mixed quality."""
    disorder = generator.choice((6, 14))
    return "".join(sorted(letters, key=lambda letter: LETTERS.index(letter) + generator.uniform(0, disorder)))


def compare(
    prompts: Sequence[str],
    answers: Sequence[Sequence[str]],
    *,
    wrong: float,
    generator: random.Random,
) -> Iterator[dict[str, Any]]:
    """Yield a ``chosen`` / ``rejected`` pair of answers to each prompt; a fraction ``wrong`` is flipped.

    Prompts whose answers all tie are skipped.
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
    """Return the columns shared by all data sets of this task."""
    return {"data_source": DATA_SOURCE, "prompt": [{"role": "user", "content": letters}]}
