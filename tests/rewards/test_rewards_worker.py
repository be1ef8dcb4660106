"""The loop of the scoring process, run in this one; ``test_rewards_process`` runs it where it belongs."""

from __future__ import annotations

import json
import os
import pickle
import sys

import cloudpickle
import pytest

from strop.rewards.worker import wire
from strop.rewards.worker.child import evaluate, serve
from strop.rewards.worker.records import Sample, Setup


def answers_to(*messages: bytes) -> list[dict]:
    """What ``serve`` answers to these messages, after which the pipe is closed."""
    requests, to_requests = os.pipe()
    from_answers, answers = os.pipe()
    for message in messages:
        wire.send(to_requests, message)
    os.close(to_requests)
    serve(requests, answers)
    os.close(answers)
    found = []
    try:
        while True:
            found.append(json.loads(wire.receive(from_answers)))
    except EOFError:
        return found
    finally:
        os.close(from_answers)
        os.close(requests)


def setup(function: object) -> bytes:
    return pickle.dumps(Setup(list(sys.path), cloudpickle.dumps(function)))


def sample(text: str) -> bytes:
    return pickle.dumps(Sample("d", text, "7", {"index": 1}))


def test_a_setup_and_samples_are_answered_in_order():
    def score(data_source, solution_str, ground_truth, extra_info=None):
        return {"score": float(solution_str == ground_truth), "length": len(solution_str)}

    assert answers_to(setup(score), sample("7"), sample("eight")) == [
        {"status": "ready"},
        {"status": "scored", "score": 1.0, "parts": {"length": 1.0}, "error": ""},
        {"status": "scored", "score": 0.0, "parts": {"length": 5.0}, "error": ""},
    ]


def test_the_loop_ends_with_the_pipe_before_and_after_the_setup():
    assert answers_to() == []
    assert answers_to(setup(lambda **sample: 1.0)) == [{"status": "ready"}]


def test_the_module_path_of_the_sender_is_taken_over(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", ["/somewhere", *sys.path])
    path = ["/elsewhere", *sys.path[1:]]
    answers_to(pickle.dumps(Setup(path, cloudpickle.dumps(lambda **sample: 1.0))))
    assert sys.path == path


def test_a_function_that_cannot_be_loaded_ends_the_loop_with_its_traceback():
    (answer,) = answers_to(pickle.dumps(Setup(list(sys.path), b"no pickle")), sample("7"))
    assert answer["status"] == "raised"
    assert "UnpicklingError" in answer["error"]


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
