"""The fan-out: names, numbers, and what happens when a tracker fails."""

from __future__ import annotations

import math
import os
import sys
from importlib.machinery import ModuleSpec
from typing import ClassVar

import numpy as np
import pytest
import torch

from strop.errors import ConfigError, MissingExtraError, TrainingError
from strop.tracking.base import RunInfo
from strop.tracking.jsonl import read_metrics
from strop.tracking.trackers import resolve_tracker

from messages import naming


class Recorder:
    """A user's own tracker."""

    built: ClassVar[list[Recorder]] = []

    def __init__(self, run):
        self.run, self.seen, self.closed = run, [], 0
        Recorder.built.append(self)

    def log(self, step, metrics):
        self.seen.append((step, dict(metrics)))

    def close(self):
        self.closed += 1


class FailsFromStep2(Recorder):
    def log(self, step, metrics):
        super().log(step, metrics)
        if step >= 2:
            raise OSError(28, "No space left on device")


class FailsEverySecondStep(Recorder):
    def log(self, step, metrics):
        super().log(step, metrics)
        if step % 2:
            raise ConnectionError("lost")


class DoesNotStart:
    def __init__(self, run):
        raise ConfigError("no login")


@pytest.fixture(autouse=True)
def _forget_recorders():
    Recorder.built = []


def test_every_tracker_gets_the_same_numbers_and_is_closed_once(track, tmp_path):
    own = f"{__name__}:Recorder"
    with track(
        tmp_path / "new" / "run", ["jsonl", own, own, "file"], config={"trainer": {"seed": 1}}
    ) as trackers:
        trackers.log(1, {"b": 0.5, "a": math.nan})
    trackers.close()
    (recorder,) = Recorder.built
    assert recorder.run.run_dir == tmp_path / "new" / "run"
    assert recorder.run.config == {"trainer": {"seed": 1}}
    assert recorder.closed == 1
    ((step, seen),) = recorder.seen
    assert (step, list(seen), seen["b"]) == (1, ["b", "a"], 0.5)
    assert math.isnan(seen["a"])
    assert [list(line) for line in read_metrics(tmp_path / "new" / "run" / "metrics.jsonl")] == [
        ["step", "b", "a"]
    ]


def test_tensors_and_numpy_scalars_become_plain_numbers(track, tmp_path):
    with track(tmp_path, [f"{__name__}:Recorder"]) as trackers:
        trackers.log(
            1, {"t": torch.tensor(0.25), "i": torch.tensor(3), "n": np.float32(0.5), "k": np.int64(7)}
        )
    ((_, seen),) = Recorder.built[0].seen
    assert seen == {"t": 0.25, "i": 3, "n": 0.5, "k": 7}
    assert [type(value) for value in seen.values()] == [float, int, float, int]


def test_values_that_are_no_numbers_are_errors_by_name(track, tmp_path):
    with track(tmp_path, []) as trackers:
        with pytest.raises(TypeError, match=naming("'actor/lr'")):
            trackers.log(1, {"actor/lr": "high"})
        with pytest.raises(ValueError, match="'step'"):
            trackers.log(1, {"step": 3.0})


def test_a_tracker_is_switched_off_after_three_failures_in_a_row_and_others_go_on(
    track, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(Recorder, "log_progress", lambda self, line: None, raising=False)
    names = [f"{__name__}:{name}" for name in ("FailsFromStep2", "FailsEverySecondStep", "Recorder")]
    with track(tmp_path, names) as trackers:
        for step in range(1, 8):
            trackers.log(step, {"x": step / 2})
            trackers.log_progress("generate")  # whose success is not that of a step
        failing, recovering, healthy = Recorder.built
        assert failing.closed == 1
    assert failing.closed == 1
    assert [step for step, _ in failing.seen] == [1, 2, 3, 4]
    for recorder in (recovering, healthy):
        assert [step for step, _ in recorder.seen] == list(range(1, 8))
    assert [line["x"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [s / 2 for s in range(1, 8)]
    warnings = [record.message for record in caplog.records if "FailsFromStep2" in record.message]
    assert len(warnings) == 3
    assert "No space left on device" in warnings[0]
    assert "switched off" in warnings[2]


def test_an_interrupt_in_a_tracker_is_not_swallowed(track, tmp_path, monkeypatch):
    def interrupted(self, step, metrics):
        raise KeyboardInterrupt

    monkeypatch.setattr(Recorder, "log", interrupted)
    with track(tmp_path, [f"{__name__}:Recorder"]) as trackers, pytest.raises(KeyboardInterrupt):
        trackers.log(1, {"x": 1.0})


def test_a_record_that_does_not_close_is_an_error_that_hides_no_earlier_one(track, tmp_path, caplog):
    def opened():
        trackers = track(tmp_path, [f"{__name__}:Recorder"])
        os.close(trackers._jsonl._file.fileno())  # so that the system refuses to close it again
        return trackers

    with pytest.raises(TrainingError, match=naming("metrics.jsonl")), opened():
        pass
    assert not caplog.text
    with pytest.raises(ConfigError, match="the first error"), opened():
        raise ConfigError("the first error")
    assert "the last steps may be missing" in caplog.text
    assert [recorder.closed for recorder in Recorder.built] == [1, 1]


def test_a_tracker_that_does_not_start_is_an_error_and_closes_the_others(track, tmp_path):
    with pytest.raises(ConfigError, match="no login"):
        track(tmp_path, [f"{__name__}:Recorder", f"{__name__}:DoesNotStart"])
    assert Recorder.built[0].closed == 1


def test_unknown_names_are_refused_before_anything_is_built(track, tmp_path):
    with pytest.raises(ConfigError, match=naming("'wandbb'", "mean wandb?", "console")):
        track(tmp_path / "run", [f"{__name__}:Recorder", "wandbb"])
    assert not Recorder.built
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=naming("'no_such_package:Tracker'")):
        resolve_tracker("no_such_package:Tracker")
    with pytest.raises(ConfigError, match=naming("'Nothing'")):
        resolve_tracker(f"{__name__}:Nothing")
    assert resolve_tracker(f"{__name__}.Recorder") is Recorder


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_missing_package_names_the_extra(name, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(MissingExtraError, match=naming(f"'strop[{name}]'")):
        resolve_tracker(name)


@pytest.mark.parametrize(
    ("name", "module"),
    [("wandb", "wandb"), ("trackio", "trackio"), ("tensorboard", "torch.utils.tensorboard")],
)
def test_an_installed_package_that_cannot_be_imported_is_an_error_before_the_run(name, module, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: ModuleSpec(name, None, origin=name))
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=naming(f"trainer.logger={name!r}")):
        resolve_tracker(name)


def test_a_tracker_finds_its_id_where_a_run_goes_on(tmp_path):
    (tmp_path / "mine.txt").write_text("abc\n")
    new, resumed = (RunInfo(tmp_path, "project", "name", {}, 10, start_step) for start_step in (0, 4))
    assert new.known_id("mine.txt") is None
    assert (resumed.known_id("mine.txt"), resumed.known_id("other.txt")) == ("abc", None)
