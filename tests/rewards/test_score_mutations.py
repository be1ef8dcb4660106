"""Scorers against right and wrong spellings of real answers."""

from __future__ import annotations

import functools
from collections.abc import Callable

import mutations as of
import pytest
from mutations import Kinds, mutations
from rewards_support import last_box_by_walking, real_rows

from strop.rewards.score import choice, gsm8k, math

GSM8K = (of.GSM8K_AROUND, of.GSM8K_RIGHT, of.GSM8K_WRONG)
FLEXIBLE = (of.GSM8K_AROUND, of.GSM8K_FLEXIBLE_RIGHT, of.GSM8K_FLEXIBLE_WRONG)
MATH = (of.MATH_AROUND, of.MATH_RIGHT, of.MATH_WRONG)
CHOICE = (of.CHOICE_AROUND, of.CHOICE_RIGHT, of.CHOICE_WRONG)


@functools.cache
def gsm8k_truths() -> list[str]:
    rows = real_rows("gsm8k", "train.jsonl", "test.jsonl")
    return [row["answer"].split("\n#### ")[1].replace(",", "") for row in rows]


@functools.cache
def math_truths() -> list[str]:
    return [last_box_by_walking(row["solution"]) for row in real_rows("math_test", "test.jsonl")]


@functools.cache
def choice_truths() -> list[str]:
    return ["ABCD"[int(row["label"])] for row in real_rows("hellaswag", "validation.first5000.jsonl")]


def misjudged(
    score: Callable[[str, str], float],
    kinds: Kinds,
    truths: list[str],
    around: list[str],
    count: int,
    *,
    right: bool,
) -> dict[str, list[tuple[str, str]]]:
    """The spellings with another score than they should have, by kind."""
    found: dict[str, list[tuple[str, str]]] = {}
    for kind, response, truth in mutations(kinds, truths, count, around=around):
        if score(response, truth) != right:
            found.setdefault(kind, []).append((truth, response))
    return found


@pytest.mark.parametrize(
    ("score", "method", "truths", "spellings", "count"),
    [
        (gsm8k.compute_score, "strict", gsm8k_truths, GSM8K, 3000),
        (gsm8k.compute_score, "flexible", gsm8k_truths, FLEXIBLE, 3000),
        (math.compute_score, "hendrycks", math_truths, MATH, 3000),
        (math.compute_score, "math-verify", math_truths, MATH, 300),
        pytest.param(math.compute_score, "math-verify", math_truths, MATH, 3000, marks=pytest.mark.slow),
        (choice.compute_score, "strict", choice_truths, CHOICE, 3000),
        (choice.compute_score, "flexible", choice_truths, CHOICE, 3000),
    ],
)
def test_right_spellings_score_and_wrong_ones_do_not(score, method, truths, spellings, count):
    if method == "math-verify":
        pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'strop[math]'")
    score = functools.partial(score, method=method)
    around, right, wrong = spellings
    assert misjudged(score, right, truths(), around, count, right=True) == {}
    assert misjudged(score, wrong, truths(), around, count, right=False) == {}
