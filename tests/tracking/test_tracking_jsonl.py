"""metrics.jsonl: exact numbers, resume, kills and full disks."""

from __future__ import annotations

import json
import math
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.errors import DataError, TrainingError
from strop.tracking.base import RunInfo
from strop.tracking.jsonl import JsonlTracker, read_metrics
from strop.trainer.run_folder import RunFolder

from messages import naming


def tracker(run_dir: Path, start_step: int = 0) -> JsonlTracker:
    return JsonlTracker(RunInfo(run_dir, "project", "experiment", {}, 10, start_step))


def log_steps(run_dir: Path, *steps: int, start_step: int = 0) -> None:
    log = tracker(run_dir, start_step)
    for step in steps:
        log.log(step, {"x": step / 10})
    log.close()


def steps_in(path: Path) -> list[int]:
    return [line["step"] for line in read_metrics(path)]


def test_a_line_is_json_with_the_step_first_and_keys_in_order(tmp_path):
    log = tracker(tmp_path)
    log.log(1, {"b/mean": 0.1, "a": 64, "c": 1e-300})
    # Readable before the tracker is closed: a killed run keeps its lines.
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "b/mean": 0.1, "a": 64, "c": 1e-300}\n'
    log.close()


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_floats_come_back_bit_for_bit(tmp_path_factory, values):
    folder = tmp_path_factory.mktemp("run")
    log = tracker(folder)
    log.log(1, {str(number): value for number, value in enumerate(values)})
    log.close()
    (line,) = read_metrics(folder / "metrics.jsonl")
    assert [line[str(number)].hex() for number in range(len(values))] == [float(v).hex() for v in values]


def test_what_is_not_finite_is_null_in_the_file_and_nan_when_read(tmp_path):
    log = tracker(tmp_path)
    log.log(1, {"a": math.nan, "b": -math.inf, "c": 1.0})
    log.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"step": 1, "a": None, "b": None, "c": 1.0}
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(line["a"])
    assert math.isnan(line["b"])


def test_a_resumed_run_drops_later_steps_and_writes_them_again(tmp_path):
    log_steps(tmp_path, 0, 1, 2, 3, 4)
    before = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    log_steps(tmp_path, 3, 4, 5, start_step=2)
    assert steps_in(tmp_path / "metrics.jsonl") == [0, 1, 2, 3, 4, 5]
    assert (tmp_path / "metrics.jsonl").read_bytes().splitlines()[:5] == before


@pytest.mark.parametrize(("lost_bytes", "kept"), [(9, [1, 2]), (1, [1, 2, 3])])  # 1: its newline only
def test_a_resumed_run_drops_the_last_line_only_if_it_is_half_written(tmp_path, lost_bytes, kept):
    log_steps(tmp_path, 1, 2, 3)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-lost_bytes])
    assert steps_in(path) == kept
    log_steps(tmp_path, 4, start_step=3)
    assert steps_in(path) == [*kept, 4]
    assert path.read_text().endswith("\n")


def test_a_resume_drops_rubbish_in_the_middle_with_a_warning(tmp_path, caplog):
    log_steps(tmp_path, 1, 2)
    path = tmp_path / "metrics.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b"\0\0\0\n" + second)
    with pytest.raises(DataError, match=naming("line 2")):
        read_metrics(path)
    assert RunFolder(tmp_path).last_logged_step() == 2  # from which a validation of the run goes on
    log_steps(tmp_path, 3, start_step=2)
    assert steps_in(path) == [1, 2, 3]
    assert "line 2" in caplog.text


def test_a_new_run_in_the_same_folder_keeps_the_old_file_aside(tmp_path):
    log_steps(tmp_path, 1, 2, 3)
    log_steps(tmp_path, 1)
    assert steps_in(tmp_path / "metrics.jsonl") == [1]
    assert steps_in(tmp_path / "metrics.previous.jsonl") == [1, 2, 3]


def test_lines_of_one_step_are_read_as_one(tmp_path):
    log = tracker(tmp_path)
    log.log(1, {"a": 1.0, "b": 2.0})
    log.log(1, {"b": 3.0, "c": 4.0})
    log.log(2, {"a": 5.0})
    log.log(1, {"c": 6.0})  # trainer.val_only of an earlier checkpoint
    log.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1, "a": 1.0, "b": 3.0, "c": 6.0},
        {"step": 2, "a": 5.0},
    ]


def test_a_full_disk_stops_the_run_and_leaves_whole_lines(tmp_path):
    log = tracker(tmp_path)
    log.log(1, {"x": 0.1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        # Room for half of the next line: a partial write, as on a disk that fills up.
        resource.setrlimit(
            resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 9, limits[1])
        )
        with pytest.raises(TrainingError, match=naming("step 2")):
            log.log(2, {"x": 0.2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "x": 0.1}\n'
    log.log(2, {"x": 0.2})
    log.close()
    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2]


def test_a_killed_process_loses_no_line(tmp_path):
    code = """
import os, signal, sys
from pathlib import Path
from strop.tracking import Tracking
names = {"project_name": "p", "experiment_name": "e"}
run = Tracking([], run_dir=Path(sys.argv[1]), config={}, total_steps=9, **names)
for step in range(1, 6):
    run.log(step, {"x": step / 3})
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [line["x"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [s / 3 for s in range(1, 6)]
