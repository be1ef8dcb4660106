from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from strop.rewards.batch import ErrorBudget
from strop.rewards.worker.records import Outcome, Sample, call_scorer, outcome_of


@pytest.mark.parametrize("value", [1, 1.0, True, np.float32(1.0), np.int64(1), torch.tensor(1.0)])
def test_anything_that_is_one_number_is_a_score(value: object):
    outcome = outcome_of(value)
    assert outcome == Outcome("scored", 1.0, {}, "")
    assert type(outcome.score) is float


def test_a_dict_gives_the_score_and_named_parts():
    outcome = outcome_of({"score": 1.5, "accuracy": True, "format": np.float64(0.5)})
    assert outcome == Outcome("scored", 1.5, {"accuracy": 1.0, "format": 0.5})


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "score .*None.* NoneType"),
        ("1.0", "score .*'1.0'.* text"),
        (b"1", "text"),
        ([1.0, 2.0], "list"),
        (1j, "complex"),
        ({"score": 1.0, "prediction": "42"}, "'prediction' .*'42'"),
        ({"score": None}, "score .*None"),
    ],
)
def test_what_is_not_a_number_is_refused(result: object, message: str):
    with pytest.raises(TypeError, match=message):
        outcome_of(result)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"accuracy": 1.0, "format": 0.0}, r"'score'.*\['accuracy', 'format'\]"),
        ({"score": 1.0, "rule": 1.0}, "'rule'"),
        ({"score": 1.0, "reward_model": 1.0}, "'reward_model'"),
    ],
)
def test_a_dict_needs_a_score_and_names_that_are_free(result: dict, message: str):
    with pytest.raises(ValueError, match=message):
        outcome_of(result)


def test_not_a_number_and_infinity_pass_for_the_reader_to_judge():
    assert math.isnan(outcome_of(float("nan")).score)
    assert not outcome_of(float("nan")).is_finite
    assert not outcome_of({"score": 1.0, "x": float("inf")}).is_finite
    assert outcome_of({"score": 1.0, "x": 2.0}).is_finite


def test_a_scorer_is_called_with_four_keywords():
    seen = {}
    call_scorer(lambda **sample: seen.update(sample) or 0, Sample("d", "text", "7", {"index": 3}))
    assert seen == {
        "data_source": "d",
        "solution_str": "text",
        "ground_truth": "7",
        "extra_info": {"index": 3},
    }


def first_excess(budget: ErrorBudget, batches: list[str]) -> tuple[int, int] | None:
    """Batch and position of the first sample beyond the budget; x: failed, . : scored."""
    for number, batch in enumerate(batches):
        budget.begin(len(batch))
        for position, mark in enumerate(batch):
            if budget.count(mark == "x"):
                return number, position
        budget.end(mark == "x" for mark in batch)
    return None


@pytest.mark.parametrize(
    ("max_rate", "batches", "expected"),
    [
        (0.1, ["x" + "." * 9], None),  # 1 of 10 is not above a tenth
        (0.1, ["xx" + "." * 8], (0, 1)),  # 2 of 10 are
        (0.1, ["xx" + "." * 18], None),
        (0.1, ["." * 17 + "xxx"], (0, 19)),
        (0.1, ["xxxx"], (0, 1)),
        (0.1, ["x..."], None),  # a quarter, but only one
        (0.1, ["x...", "...."], None),
        (0.1, ["x...", "x..."], (1, 0)),  # 2 of 8
        (0.1, ["x", "x"], (1, 0)),
        (0.1, ["x..."] + ["...."] * 4 + ["x..."], None),  # 2 of 24
        (0.1, ["x" * 25 + "." * 231], None),  # 25 of 256
        (0.1, ["x" * 26 + "." * 230], (0, 25)),
        (0.1, ["x" * 25 + "." * 231, "." * 256, "x" * 25 + "." * 231], None),  # the first is forgotten
        (0.1, ["x" * 30 + "." * 270], None),  # larger than the window: judged alone
        (0.1, ["x" * 31 + "." * 269], (0, 30)),
        (0.0, ["...x"], (0, 3)),
        (0.0, ["...."], None),
        (1.0, ["x" * 500], None),
        (1.0, ["x"], None),
    ],
)
def test_the_budget_bears_its_rate_and_always_one_failure(
    max_rate: float, batches: list[str], expected: tuple[int, int] | None
):
    assert first_excess(ErrorBudget(max_rate), batches) == expected
