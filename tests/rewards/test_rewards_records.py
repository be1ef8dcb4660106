from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from strop.rewards.reward_output import ErrorBudget, rule_parts
from strop.rewards.scorer import Outcome, Scorer, outcome_of
from strop.rewards.worker.process import read_answer

from messages import naming


@pytest.mark.parametrize("value", [1, 1.0, True, np.float32(1.0), np.int64(1), torch.tensor(1.0)])
def test_anything_that_is_one_number_is_a_score(value: object):
    outcome = outcome_of(value)
    assert outcome == Outcome("scored", 1.0, {}, "")
    assert type(outcome.score) is float


def test_a_dict_gives_the_score_and_named_parts():
    outcome = outcome_of({"score": 1.5, "accuracy": True, "format": np.float64(0.5)})
    assert outcome == Outcome("scored", 1.5, {"accuracy": 1.0, "format": 0.5})


def test_a_dict_may_hold_texts_none_and_structures_next_to_its_numbers():
    found = {"score": 0.5, "acc": True, "pred": "12\ud800", "why": None, "tests": [1, {"ok": None}]}
    wanted = {"acc": 1.0, "pred": "12?", "why": None, "tests": '[1, {"ok": null}]'}
    assert outcome_of(found) == Outcome("scored", 0.5, wanted)
    assert len(outcome_of({"score": 1, "pred": "a" * 10**6}).parts["pred"]) == 20_000


def test_texts_are_split_from_the_numbers_of_a_batch():
    rows = [{"acc": 1.0, "pred": "12", "note": None}, {"acc": None, "pred": None}, {}, {"acc": "?"}]
    outcomes = [Outcome("scored", 0.0, row) for row in rows] + [Outcome("raised", error="e"), None]
    parts, texts = rule_parts(outcomes, [True] * 6, error_score=-1)
    nan = math.nan
    assert parts.keys() == {"rule", "acc"}
    torch.testing.assert_close(parts["acc"], torch.tensor([1.0, *[nan] * 5]), equal_nan=True)
    torch.testing.assert_close(parts["rule"], torch.tensor([0.0, 0, 0, 0, -1, nan]), equal_nan=True)
    assert texts == {
        "acc": [None, None, None, "?", None, None],
        "pred": ["12", *[None] * 5],
        "note": [None] * 6,
    }


@pytest.mark.parametrize(
    ("result", "error", "parts"),
    [
        (None, TypeError, ("score", "None", "NoneType")),
        ("1.0", TypeError, ("score", "'1.0'", "text")),
        (b"1", TypeError, ("text",)),
        ([1.0, 2.0], TypeError, ("list",)),
        (1j, TypeError, ("complex",)),
        ({"score": 1.0, "prediction": b"42"}, TypeError, ("'prediction'", "'42'")),
        ({"score": "1.0", "acc": 1.0}, TypeError, ("score", "'1.0'", "text")),
        ({"score": 1.0, "rule": "text"}, ValueError, ("'rule'",)),
        ({"accuracy": 1.0, "format": 0.0}, ValueError, ("'score'", "['accuracy', 'format']")),
        ({"score": 1.0, "rule": 1.0}, ValueError, ("'rule'",)),
        ({"score": 1.0, "reward_model": 1.0}, ValueError, ("'reward_model'",)),
    ],
)
def test_other_results_are_refused(result: object, error: type[Exception], parts: tuple[str, ...]):
    with pytest.raises(error, match=naming(*parts)):
        outcome_of(result)


def answer(**changes: object) -> bytes:
    whole = {"token": "t", "status": "scored", "score": 1.0, "parts": {"a": 0.5}, "error": ""}
    return json.dumps(whole | changes).encode()


def read_outcome(line: bytes) -> Outcome:
    token, outcome = read_answer(line)
    assert token == "t"
    return Scorer.checked(outcome)


def test_an_answer_is_read():
    assert read_outcome(answer()) == Outcome("scored", 1.0, {"a": 0.5})
    failed = answer(status="raised", error="Traceback")
    assert read_outcome(failed) == Outcome("raised", 1.0, {"a": 0.5}, "Traceback")


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"score": ' + b"9" * 10_000 + b"}",
        answer(token=None),
        answer(status="timeout"),
        answer(status=[]),
        answer(score="1.0"),
        answer(score=10**400),
        answer(score=True),
        answer(parts=[1.0]),
        answer(parts={"a": [1.0]}),
        answer(parts={"a": True}),
        answer(parts={"a": "\ud800"}),
        answer(parts={"a": 10**400}),
        answer(parts={"rule": 1.0}),
        answer(error=5),
        answer(error="a scored sample with an error"),
        answer(status="raised"),  # without an error it would count as scored
        answer(status="raised", error="\ud800"),
    ],
)
def test_anything_else_in_the_pipe_is_refused(line: bytes):
    with pytest.raises(ValueError):
        read_outcome(line)


def test_the_pipe_carries_json_and_the_scorer_takes_numbers_alone():
    found = {"turns": [{"role": "tool", "content": None}], "n": 2}
    _, outcome = read_answer(answer(parts=found))
    assert outcome == Outcome("scored", 1.0, found)
    with pytest.raises(ValueError, match="turns"):
        Scorer.checked(outcome)


@pytest.mark.parametrize("name", ["a\ud800", "a\0", "a\nb", "\x1b[2J"])
def test_a_part_with_an_unprintable_name_is_a_crash(name: str):
    outcome = read_outcome(answer(parts={name: 1.0}))
    assert outcome.status == "crashed"
    assert outcome.error.encode().isascii()


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
def test_the_budget_allows_its_rate_and_at_least_one_failure(
    max_rate: float, batches: list[str], expected: tuple[int, int] | None
):
    assert first_excess(ErrorBudget(max_rate), batches) == expected
