"""Samples that go on in another engine: the same turns, counts and rewards, and nothing is run that broke."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from strop.errors import CheckpointError
from strop.rollout.in_flight import InFlight

from scripted import Script, answers, call, conversation, ended_by, environments_of, resumed


class Works:
    """Writes each call into a file."""

    def reset(self, log, **row):
        self.log, self.count = log, 0

    def more(self) -> str:
        """Count."""
        self.count += 1
        return str(self.count)

    def fail(self) -> str:
        """Fail."""
        raise ValueError("no")

    def leave(self) -> str:
        """End the process."""
        with open(self.log, "a") as file:
            file.write("left\n")
        os._exit(3)

    def respond(self, response, turn):
        return f"[{response} {turn}]" if response != "end" else None

    def reward(self, turns):
        return [len(str(turn.answers)) + len(turn.calls) for turn in turns]


SCRIPTS = [
    [call("more"), "end"],
    [call("no"), call("fail"), "x", "end"],
    [call("leave"), call("more"), "end"],
    [call("more") * 2, "x", call("more"), "end"],
    [call("more"), call("leave"), "end"],
    ["x", "x" * 100],
    [call("more"), "end"],
]


@pytest.mark.fast("1-tell")
@pytest.mark.parametrize(("waves", "error"), [(1, "tell"), (3, "tell"), (3, "end")])
def test_a_resumed_sample_has_all_turns_counts_and_rewards_of_one_that_was_not(tmp_path, waves, error):
    def made(name: str) -> Script:
        rows = {"log": [str(tmp_path / name)] * len(SCRIPTS)}
        return Script(environments_of(own=Works), SCRIPTS, rows=rows, error=error, turn_length=80)

    whole = made("whole").play()
    before = made("resumed")
    for _ in range(waves):
        before.decode()
        waiting = before.batch.waiting.nonzero()[:, 0].tolist()
        before.episodes.answer([(before.batch, row) for row in waiting])
    before.decode([3, 6])
    before.pool.close()
    log = tmp_path / "resumed"
    left, rows = log.read_text(), {"log": [str(log)] * len(SCRIPTS)}
    after = resumed(before, environments_of(own=Works), rows=rows, error=error, turn_length=80).play()
    assert whole.batch.keys() == after.batch.keys()
    for name, column in whole.batch.items():  # of lost samples environment_scores are NaN
        torch.testing.assert_close(after.batch[name], column, rtol=0, atol=0, equal_nan=True, msg=name)
    assert whole.non_tensor_batch["conversation"].tolist() == after.non_tensor_batch["conversation"].tolist()
    if waves == 3:  # what cost its process is not tried again
        assert log.read_text() == left != ""
    ends = "environment" if error == "tell" else "error"
    assert ended_by(after) == ["environment", ends, ends, "environment", ends, "length", "environment"]
    assert after.batch["n_malformed"].tolist() == [0, 1, 0, 0, 0, 0, 0]
    assert after.batch["n_errors"].tolist() == [0, 1, 1, 0, 1, 0, 0]


class Replies:
    """Answers every turn with its text in brackets; ends at "bye"."""

    def reset(self, **row):
        pass

    def respond(self, response, turn):
        return None if response == "bye" else f"[{response}]"


def _once_answered(environment, scripts, **options) -> Script:
    before = Script(environments_of(own=environment), scripts, **options)
    before.decode()
    before.episodes.answer([(before.batch, row) for row in range(len(scripts))])
    return before


def test_a_sample_between_two_turns_goes_on():
    scripts = [["a", "b", "c", "bye"], ["bye"], ["x", "y", "bye"]]
    whole = Script(environments_of(own=Replies), scripts).play()
    before = _once_answered(Replies, scripts)
    before.decode([0])
    before.pool.close()
    after = resumed(before, environments_of(own=Replies)).play()
    for name, column in whole.batch.items():
        assert torch.equal(column, after.batch[name]), name


class Changes:
    """Answers otherwise in every process."""

    def reset(self, **row):
        pass

    def respond(self, response, turn):
        return str(os.getpid()) if turn < 2 else None


def test_an_environment_that_answers_otherwise_is_an_error_after_a_resume():
    before = _once_answered(Changes, [["a", "b", "c"]])
    before.pool.close()
    with pytest.raises(CheckpointError, match=r"sample 0 .*turn 0"):
        resumed(before, environments_of(own=Changes)).play()
    recorded = resumed(before, environments_of(own=Changes), replay="recorded").play()
    assert ended_by(recorded) == ["environment"]
    assert answers(recorded)[0] == conversation(recorded)[0]["answers"][0]["content"]


def test_what_one_rank_raises_is_raised_on_all():
    """Each of two threads is a rank, with a sample of its own; only the first one checks what is replayed."""
    before = _once_answered(Changes, [["a", "b", "c"]] * 2)
    before.pool.close()
    state, meet, values = before.batch.state(), threading.Barrier(2), {}

    def run(rank: int) -> str:
        replay = ("check", "recorded")[rank]
        script = Script(environments_of(own=Changes), before.scripts, replay=replay)
        parts = [script.batch.prompts[[row]] for row in range(2)]
        script.batch = InFlight(parts[rank], script.batch.params, parts, rank, turn_length=99)
        script.batch.restore(state)
        script.turn = list(before.turn)

        def gather(value):
            values[rank] = value
            meet.wait(300)
            found = [values[0], values[1]]
            meet.wait(300)
            return found

        try:
            script.episodes.complete([script.batch], script.decode, gather)
        except CheckpointError as error:
            return str(error)
        finally:
            script.pool.close()
        return "no error"

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(run, range(2))
    assert "turn 0" in first
    assert second == first


class Leaves(Changes):
    def work(self) -> str:
        """End the process."""
        os._exit(3)


def test_an_environment_that_answers_otherwise_loses_its_sample_while_the_run_goes_on():
    scripts = [["a", "b", "c"], [call("work"), "b", "c"]]
    before = _once_answered(Leaves, scripts)
    assert before.batch.records[1].errors == 1
    result = before.play()
    assert ended_by(result) == ["error", "environment"]
    assert result.batch["n_errors"].tolist() == [1, 1]


class Draws:
    """Its board does not follow from its seed."""

    def reset(self, **row):
        return f"The board is {os.urandom(8).hex()}."

    def leave(self) -> str:
        """End the process."""
        os._exit(3)

    def respond(self, response, turn):
        return None


@pytest.mark.parametrize("replay", ["check", "recorded"])
def test_a_reset_that_tells_otherwise_than_the_prompt_loses_its_sample(replay):
    result = Script(environments_of(own=Draws), [["a"]] * 4, n=4, replay=replay).play()
    assert ended_by(result) == ["environment", "error", "error", "error"]
    # of one whose environment is rebuilt, the recorded text may count
    result = Script(environments_of(own=Draws), [[call("leave"), "b"]], replay=replay).play()
    assert ended_by(result) == ["environment" if replay == "recorded" else "error"]


class Board:
    def reset(self, path, **row):
        return Path(path).read_text()

    def respond(self, response, turn):
        return "go on" if turn < 1 else None


def test_a_reset_that_tells_otherwise_is_an_error_after_a_resume(tmp_path):
    rows = {"path": [str(tmp_path / "board")]}
    (tmp_path / "board").write_text("The board is x.")
    before = _once_answered(Board, [["a", "b"]], rows=rows)
    assert ended_by(resumed(before, environments_of(own=Board), rows=rows).play()) == ["environment"]
    (tmp_path / "board").write_text("The board is y.")
    with pytest.raises(CheckpointError, match="reset"):
        resumed(before, environments_of(own=Board), rows=rows)
    before.pool.close()
