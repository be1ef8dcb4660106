"""The processes of environments: what cannot start, is closed, floods, or is left behind."""

from __future__ import annotations

import gc
import sqlite3
import threading
import time
from dataclasses import replace

import pytest
from clocks import ENVIRONMENTS, Clock

from strop.environments.pool import EnvironmentPool, Request
from strop.errors import RewardError
from strop.rollout.base import GenerationStopped
from strop.rollout.queued import QueuedRollout

from scripted import Script, answers, call, cut_off_once, ended_by, environments_of, settings_of

LONGEST_S = 60
"""Until a test that waits for ever fails."""


class Slow:
    def reset(self, **row):
        pass

    def wait(self, seconds: float) -> str:
        """Wait.

        Args:
            seconds: How long.
        """
        time.sleep(seconds)
        return "waited"


_TURN = {"number": 0, "text": "", "calls": []}


def _request(number: int = 0, **content) -> Request:
    return Request(f"e{number}", {}, 0, [], content or {"turn": _TURN})


def test_requests_are_answered_by_an_error_if_no_process_starts():
    pool = EnvironmentPool(replace(environments_of(own=Slow), blueprint=b"no pickle"), settings_of())
    for number in range(2):  # the first one, too, and one that comes after the error
        with pytest.raises(RewardError, match="environment cannot be loaded"):
            pool.submit(_request(number)).result(LONGEST_S)
    pool.close()


def test_requests_without_an_answer_end_with_their_pool():
    pool = EnvironmentPool(environments_of(own=Slow), settings_of())
    calls = [{"name": "wait", "arguments": {"seconds": LONGEST_S}}]
    answer = pool.submit(_request(turn=_TURN | {"calls": calls}))
    time.sleep(0.1)
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        answer.result(LONGEST_S)


def test_a_pool_that_is_dropped_ends_its_processes():
    pool = EnvironmentPool(environments_of(own=Slow), settings_of())
    pool.submit(_request()).result(LONGEST_S)
    (process,) = pool._processes
    child, thread = process._child, process._thread
    del pool, process
    gc.collect()
    thread.join(LONGEST_S)
    assert not child.is_alive()


@pytest.mark.fast("2")
@pytest.mark.parametrize("n_requests", [1, 2])
def test_a_process_that_is_killed_from_outside_changes_no_answer(n_requests):
    pool = EnvironmentPool(environments_of(own=Slow), settings_of())
    calls = [{"name": "wait", "arguments": {"seconds": 1.0}}]
    asked = [pool.submit(_request(number, turn=_TURN | {"calls": calls})) for number in range(n_requests)]
    (process,) = pool._processes
    while len(process._known) < n_requests:  # the calls run
        time.sleep(0.02)
    process._child.process.kill()
    assert [one.result(LONGEST_S)["texts"] for one in asked] == [["waited"]] * n_requests
    pool.close()


def test_each_call_of_a_turn_has_the_time_of_a_method(monkeypatch):
    clock, passed = Clock(monkeypatch, *ENVIRONMENTS), []

    def passes(request, is_begun):
        if is_begun and "turn" in request.content and not passed:
            passed.append(clock)
            clock.passed += 100.0
        return False

    cut_off_once(monkeypatch, passes)
    said = "".join([call("wait", seconds=0.3)] * 3)
    result = Script(environments_of(own=Slow), [[said, "end"]], timeout=60.0).play()
    assert answers(result) == ["waited"] * 3
    assert passed


def test_a_method_that_takes_long_is_left_when_the_run_ends():
    script = Script(environments_of(own=Slow), [[call("wait", seconds=600.0)]], timeout=500.0)
    rollout = QueuedRollout(pad_token_id=0, eos_token_ids=[1], episodes=script.episodes)
    rollout.stopping = threading.Event()  # as the worker sets its own
    threading.Timer(0.5, rollout.stopping.set).start()
    begun = time.monotonic()
    with pytest.raises(GenerationStopped):
        script.play()
    assert time.monotonic() - begun < LONGEST_S


class Floods:
    def reset(self, **row):
        pass

    def flood(self) -> str:
        """Flood."""
        return "\N{GRINNING FACE}" * 200_000


def test_long_answers_of_several_calls_do_not_cost_the_process():
    result = Script(environments_of(own=Floods), [[call("flood") * 3, "end"]], answer_length=60).play()
    assert result.batch["n_errors"].tolist() == [0]
    assert len(answers(result)) == 3


def repeat(word: str, more: dict) -> str:
    """Raise an error with a word.

    Args:
        word: The word.
        more: Anything.
    """
    raise ValueError(word + "\ud800")


@pytest.mark.parametrize("depth", [1, 800])
def test_arguments_and_errors_that_no_process_or_file_takes_are_told(depth, caplog):
    nested = '{"a":' * depth + '"\\ud800"' + "}" * depth
    said = f'<tool_call>{{"name": "repeat", "arguments": {{"word": "w", "more": {nested}}}}}</tool_call>'
    script = [said, call("repeat", word="w", more={}), "end"]
    result = Script(environments_of(repeat), [script], max_tokens=8000).play()
    assert ended_by(result) == ["stop"]
    assert result.batch["n_malformed"].tolist() == [1]
    malformed, error = answers(result)
    assert "JSON" in malformed
    assert error == "error: ValueError: w?"
    result.non_tensor_batch["conversation"][0].encode()
    assert 'raise ValueError(word + "' in caplog.text.encode().decode()  # the log shows the first error


class Bound:
    """Its connection takes no call from another thread; a call waits until so many run."""

    def reset(self, **row):
        self.base = sqlite3.connect(":memory:")
        self.base.execute("create table calls (n)")

    def meet(self, calls: int) -> str:
        """Wait for other calls.

        Args:
            calls: How many.
        """
        self.base.execute("insert into calls values (1)")
        barrier = vars(threading).setdefault("of_the_test", threading.Barrier(calls))  # of all samples
        barrier.wait(LONGEST_S)
        return str(self.base.execute("select count(*) from calls").fetchone()[0])

    def close(self):
        self.base.close()


def test_the_stacks_of_many_samples_are_not_of_the_limit_of_memory():
    pool = EnvironmentPool(environments_of(own=Bound), settings_of(memory_limit_mb=256))
    begun = [pool.submit(Request(f"e{number}", {}, 0, [], {})) for number in range(400)]
    assert [one.result(LONGEST_S).get("failed") for one in begun] == [None] * 400
    turn = _TURN | {"calls": [{"name": "meet", "arguments": {"calls": 64}}]}
    asked = [pool.submit(_request(number, turn=turn)) for number in range(64)]
    assert [one.result(LONGEST_S)["texts"] for one in asked] == [["1"]] * 64
    pool.close()
