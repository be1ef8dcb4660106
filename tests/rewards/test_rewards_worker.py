"""What the scoring process makes of a scorer's result or error; ``test_rewards_process`` runs the process."""

from __future__ import annotations

import pickle
import sys

import pytest

from strop.rewards.worker.child import evaluate
from strop.rewards.worker.records import Sample


def sample(text: str) -> bytes:
    return pickle.dumps(Sample("d", text, "7", {"index": 1}))


def fail(error: BaseException) -> object:
    def score(**sample):
        raise error

    return score


@pytest.mark.parametrize("error", [ValueError("bad \ud800 text"), SystemExit(3), KeyboardInterrupt()])
def test_whatever_a_scorer_raises_is_an_outcome_that_can_be_printed(error: BaseException):
    outcome = evaluate(fail(error), sample("7"))
    assert outcome.status == "raised"
    assert type(error).__name__ in outcome.error
    assert "in score" in outcome.error
    outcome.error.encode()


def test_a_long_traceback_keeps_its_beginning_and_its_end():
    outcome = evaluate(fail(ValueError("x" * 100_000 + "end")), sample("7"))
    assert len(outcome.error) < 10_000
    assert outcome.error.startswith("Traceback")
    assert outcome.error.rstrip().endswith("end")


def test_a_result_that_is_no_score_is_an_outcome():
    outcome = evaluate(lambda **sample: "right", sample("7"))
    assert outcome.status == "raised"
    assert "found text" in outcome.error


def test_a_scorer_may_close_the_standard_streams(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert evaluate(lambda **sample: 1.0, sample("7")).status == "scored"
