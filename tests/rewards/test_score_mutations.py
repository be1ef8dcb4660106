"""Scorers against 3,000 right and 3,000 wrong spellings of real answers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import mutations as of
import pytest
from mutations import Kinds, mutations
from rewards_support import last_box_by_walking, real_rows

from strop.rewards.score import choice, gsm8k, math

COUNT = 3000


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
    score: Callable[..., float], kinds: Kinds, truths: Sequence[str], around: Sequence[str], *, right: bool
) -> dict[str, list[tuple[str, str]]]:
    """The spellings with another score than they should have, by kind."""
    found: dict[str, list[tuple[str, str]]] = {}
    for kind, response, truth in mutations(kinds, truths, COUNT, around=around):
        if score(response, truth) != right:
            found.setdefault(kind, []).append((truth, response))
    return found


@pytest.mark.parametrize(
    ("score", "truths", "around", "right", "wrong"),
    [
        pytest.param(
            gsm8k.compute_score, gsm8k_truths, of.GSM8K_AROUND, of.GSM8K_RIGHT, of.GSM8K_WRONG, id="gsm8k"
        ),
        pytest.param(
            functools.partial(gsm8k.compute_score, method="flexible"),
            gsm8k_truths,
            of.GSM8K_AROUND,
            of.GSM8K_FLEXIBLE_RIGHT,
            of.GSM8K_FLEXIBLE_WRONG,
            id="gsm8k flexible",
        ),
        pytest.param(
            math.compute_score, math_truths, of.MATH_AROUND, of.MATH_RIGHT, of.MATH_WRONG, id="math"
        ),
        pytest.param(
            functools.partial(math.compute_score, method="math-verify"),
            math_truths,
            of.MATH_AROUND,
            of.MATH_RIGHT,
            of.MATH_WRONG,
            id="math-verify",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            choice.compute_score,
            choice_truths,
            of.CHOICE_AROUND,
            of.CHOICE_RIGHT,
            of.CHOICE_WRONG,
            id="choice",
        ),
        pytest.param(
            functools.partial(choice.compute_score, method="flexible"),
            choice_truths,
            of.CHOICE_AROUND,
            of.CHOICE_RIGHT,
            of.CHOICE_WRONG,
            id="choice flexible",
        ),
    ],
)
def test_right_spellings_score_and_wrong_ones_do_not(score, truths, around, right, wrong):
    if getattr(score, "keywords", {}).get("method") == "math-verify":
        pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'strop[math]'")
    truths = truths()
    assert misjudged(score, right, truths, around, right=True) == {}
    assert misjudged(score, wrong, truths, around, right=False) == {}
