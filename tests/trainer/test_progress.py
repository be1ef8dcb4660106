"""Progress inside an iteration: its line, its forecasts, and that it changes no result."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from strop.config.load import load_config
from strop.trainer.build import build_trainer
from strop.trainer.metrics import PhaseTimer
from strop.trainer.progress import Progress

from messages import mentions
from runs import fit, hashes, make_inputs, metrics, overrides


class Clock:
    """A clock that tests move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def progress(clock):
    keys = ["actor_rollout_ref.model.path=m", "data.train_files=f", "data.max_response_length=1000"]
    return Progress(load_config(keys))


def test_the_first_iteration_is_bounded_while_it_generates(progress, clock):
    progress.begin(1, 40)
    with PhaseTimer(progress.phases).phase("gen"):
        advanced = progress.generating(16)
        assert "0 of 16 samples" in progress._line()
        advanced(0, 0, 0)
        clock.now += 2
        advanced(0, 4, 160)  # two ranks, by their first rows
        advanced(8, 0, 160)
        # 12 samples of 980 further tokens at 160 tok/s: 74 s, and 2 s that have passed
        assert progress._line() == (
            "step 1/40  generate 0:00:02  4 of 16 samples, 160 tok/s  "
            "generation at most 0:01:16 a step, 0:50:20 in the run"
        )
        clock.now += 5
        assert "160 tok/s" in progress._line()  # of the last report
    with PhaseTimer(progress.phases).phase("update_actor"):
        clock.now += 3
        assert (
            progress._line() == "step 1/40  update_actor 0:00:03  at least 0:00:10 a step, 0:06:40 in the run"
        )


def test_later_iterations_have_the_mean_of_those_before(progress, clock):
    for step in (1, 2, 3):
        progress.begin(step, 40)
        clock.now += 10 * step
    with PhaseTimer(progress.phases).phase("gen"):
        assert progress._line().endswith("  0:00:15 a step, 0:10:00 in the run")


def test_the_call_that_runs_is_shown_where_several_are_in_flight(progress):
    with PhaseTimer(progress.phases).phase("wait_samples"):
        first = progress.generating(16)
        progress.generating(16)
        first(0, 3, 50)
        assert "3 of 16 samples" in progress._line()


def test_a_run_above_a_day_is_warned_of_once_with_the_keys_that_shorten_it(progress, clock, caplog):
    for step in (1, 2, 3):
        progress.begin(step, 1000)
        clock.now += 100
        with PhaseTimer(progress.phases).phase("gen"), caplog.at_level(logging.WARNING):
            progress._line()
    (warning,) = caplog.messages
    keys = ("data.max_response_length=1000", "rollout.n=1", "total_training_steps=1000")
    assert mentions(warning, "1 day", *keys)


def test_a_forecast_is_not_warned_of_at_the_first_tokens(progress, clock, caplog):
    progress.begin(1, 10)
    with PhaseTimer(progress.phases).phase("gen"), caplog.at_level(logging.WARNING):
        advanced = progress.generating(10)
        advanced(0, 0, 0)
        for seconds in (5, 6):
            clock.now += seconds
            advanced(0, 0, seconds)
            assert "generation at most" in progress._line()
            assert len(caplog.messages) == (seconds == 6)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def test_results_are_those_of_a_run_without_progress(inputs: Path, tmp_path: Path, monkeypatch):
    lines: list[str] = []

    @contextlib.contextmanager
    def hidden(self: Progress, show: Callable[[str], None]) -> Generator[None]:
        yield

    def run(name: str) -> tuple[dict[str, str], list[dict]]:
        extra = ("algorithm.adv_estimator=grpo", "data.max_response_length=16", "trainer.test_freq=1")
        trainer = build_trainer(load_config(overrides(inputs, tmp_path / name, *extra)))
        trainer.init_workers()
        fit(trainer)
        return hashes(trainer), metrics(tmp_path / name)

    with monkeypatch.context() as patched:
        patched.setattr(Progress, "shown", hidden)
        patched.setattr(Progress, "generating", lambda *arguments: None)
        without = run("without")
    generating = Progress.generating

    def noted(self: Progress, *arguments: int) -> Callable[[int, int, int], None]:
        advanced = generating(self, *arguments)

        def note(*counts: int) -> None:
            advanced(*counts)
            lines.append(self._line())

        return note

    monkeypatch.setattr(Progress, "generating", noted)
    assert run("with") == without
    assert any(line.startswith("validate ") and " of 6 samples" in line for line in lines)
    assert any(line.startswith("step 1/2  generate ") and " of 16 samples" in line for line in lines)
    assert any(line.startswith("step 2/2  validate ") for line in lines)
