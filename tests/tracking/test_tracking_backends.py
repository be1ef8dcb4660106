"""TensorBoard and Weights & Biases: real files, read back."""

from __future__ import annotations

import json
import struct
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imsave

from strop.errors import ConfigError
from strop.tracking import Tracking
from strop.tracking.report import ShownPair, ValidationReport

from messages import naming

event_accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="needs strop[tensorboard]"
)
wandb = pytest.importorskip("wandb", reason="needs strop[wandb]")


def log_steps(name, run_dir, *steps, start_step=0, fail=False):
    with Tracking(
        [name],
        run_dir=run_dir,
        project_name="my-project",
        experiment_name="my-run",
        config={"actor": {"lr": 0.001}},
        total_steps=9,
        start_step=start_step,
    ) as tracking:
        for step in steps:
            tracking.log(step, {"critic/score/mean": step / 8 + start_step, "actor/lr": float("nan")})
        if fail:
            raise RuntimeError("the run breaks")


def scalars(run_dir):
    events = event_accumulator.EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"critic/score/mean", "actor/lr"}
    assert b'"lr": 0.001' in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    return [(event.step, event.value) for event in events.Scalars("critic/score/mean")]


def test_tensorboard_hides_the_steps_that_a_resumed_run_repeats(tmp_path):
    log_steps("tensorboard", tmp_path, 0, 1, 2, 3, 4)
    assert scalars(tmp_path) == [(0, 0.0), (1, 0.125), (2, 0.25), (3, 0.375), (4, 0.5)]
    log_steps("tensorboard", tmp_path, 3, 4, 5, start_step=2)
    assert scalars(tmp_path) == [(0, 0.0), (1, 0.125), (2, 0.25), (3, 2.375), (4, 2.5), (5, 2.625)]


def test_tensorboard_hides_an_earlier_run_in_the_same_folder(tmp_path):
    log_steps("tensorboard", tmp_path, 0, 1, 2, 3)
    log_steps("tensorboard", tmp_path, 0, 1)
    assert scalars(tmp_path) == [(0, 0.0), (1, 0.125)]


def wandb_records(run_dir: Path, runs_expected: int, patience_s: float = 60) -> list:
    """The records of each offline run, oldest first, once every run has its last one, its exit.

    wandb's own process writes them, at its own pace: nothing else tells when the files are whole.
    """
    deadline = time.monotonic() + patience_s
    while True:
        runs = written_records(run_dir)
        if sum(any(kind_of(record) == "exit" for record in run) for run in runs) == runs_expected:
            return runs
        assert time.monotonic() < deadline, (
            f"{len(runs)} runs, not all with an exit record after {patience_s} s"
        )
        time.sleep(0.1)


def kind_of(record) -> str:
    return record.WhichOneof("record_type")


def written_records(run_dir: Path) -> list:
    """LevelDB's log format, a protobuf message each."""
    from wandb.proto import wandb_internal_pb2

    runs = []
    for path in sorted(
        (run_dir / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime
    ):
        raw, at, message, records = path.read_bytes(), 7, b"", []
        while at + 7 <= len(raw):
            if (left := 32768 - at % 32768) < 7:
                at += left
                continue
            _, length, kind = struct.unpack("<IHB", raw[at : at + 7])
            if at + 7 + length > len(raw):  # being written
                break
            message += raw[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # whole, or the last piece
                record = wandb_internal_pb2.Record()
                record.ParseFromString(message)
                records.append(record)
                message = b""
        runs.append(records)
    return runs


def history(records) -> list[tuple[int, float]]:
    rows = []
    for record in records:
        if kind_of(record) == "history":
            items = {
                item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item
            }
            assert items["step"] == items["_step"]
            rows.append((items["step"], items["critic/score/mean"]))
    return rows


@pytest.mark.usefixtures("wandb_offline")
def test_wandb_offline_records_every_step_and_a_resume_continues_the_run(tmp_path):
    log_steps("wandb", tmp_path, 0, 1, 2)
    log_steps("wandb", tmp_path, 2, 3, start_step=1, fail=False)
    first, second = wandb_records(tmp_path, 2)
    (run,) = [record.run for record in first if kind_of(record) == "run"]
    (again,) = [record.run for record in second if kind_of(record) == "run"]
    assert (run.project, run.display_name) == ("my-project", "my-run")
    assert {item.key: item.value_json for item in run.config.update}["actor"] == '{"lr":0.001}'
    assert run.run_id == again.run_id == (tmp_path / "wandb_run_id.txt").read_text().strip()
    assert history(first) == [(0, 0.0), (1, 0.125), (2, 0.25)]
    assert history(second) == [(2, 1.25), (3, 1.375)]


@pytest.mark.usefixtures("wandb_offline")
def test_no_tracker_gets_a_credential(tmp_path, track, monkeypatch):
    command = ["strop", "train", "--api-key", "Swordfish", "password=Swordfish"]
    monkeypatch.setattr("sys.argv", command)
    config = {"reward": {"headers": {"X": "Swordfish"}, "url": "https://ada:Swordfish@host.net/x"}, "lr": 0.5}
    with track(tmp_path, ["wandb", "tensorboard"], config=config) as tracking:
        tracking.log(1, {"reward": 0.5})
    assert sys.argv is command
    [records] = wandb_records(tmp_path, 1)
    assert "lr" in str(records)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.name for path in files if b"Swordfish" in path.read_bytes()] == []
    assert any(b"host.net" in path.read_bytes() for path in files)


@pytest.mark.usefixtures("wandb_offline")
def test_wandb_keeps_a_picture_with_its_step(tmp_path, track):
    drawn = np.zeros((20, 30, 3))
    imsave(tmp_path / "picture.png", drawn)
    with track(tmp_path / "run", ["wandb"]) as tracking:
        tracking.log(1, {"critic/score/mean": 0.5})
        tracking.log_image(1, "data/token_lengths", tmp_path / "picture.png")
    (records,) = wandb_records(tmp_path / "run", 1)
    items = {
        tuple(item.nested_key): json.loads(item.value_json)
        for record in records
        if kind_of(record) == "history"
        for item in record.history.item
    }
    logged = [items["data/token_lengths", name] for name in ("_type", "width", "height")]
    assert (logged, items[("step",)]) == (["image-file", 30, 20], 1)
    assert list((tmp_path / "run").rglob("media/images/data/token_lengths_*.png"))


@pytest.mark.usefixtures("wandb_offline")
def test_wandb_has_the_link_to_the_hub_and_pairs_and_the_run_folder_where_the_run_is(tmp_path, track):
    link = "https://hub.example/ada/first/tree/v1"
    pairs = ValidationReport(1, {}, [ShownPair("sums", "1+1=", "2", "3", 0.5, -0.25)])
    with track(tmp_path, ["wandb", "tensorboard"], hf_repo_url=link) as tracking:
        tracking.log(1, {"critic/score/mean": 0.5})
        tracking.log_validation(1, pairs)
    (records,) = wandb_records(tmp_path, 1)
    (run,) = [record.run for record in records if kind_of(record) == "run"]
    assert {item.key: item.value_json for item in run.config.update}["hf_repo_url"] == f'"{link}"'
    summaries = [item for record in records if kind_of(record) == "summary" for item in record.summary.update]
    assert f'"{link}"' in [item.value_json for item in summaries if item.key == "hf_repo_url"]
    (table,) = (tmp_path / "wandb").rglob("media/table/val/preferences_*.json")
    assert json.loads(table.read_text())["data"] == [["sums", "1+1=", "2", "3", 0.5, -0.25]]
    assert run.run_id in json.loads((tmp_path / "trackers.json").read_text())["wandb"]
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    shown = events.Tensors("val/preferences/text_summary")[0].tensor_proto.string_val[0]
    assert b"**chosen 0.5**, **rejected -0.25** (sums)" in shown


@pytest.mark.usefixtures("wandb_offline")
def test_wandb_marks_a_broken_run_as_failed_and_a_new_run_gets_a_new_id(tmp_path):
    with pytest.raises(RuntimeError, match="the run breaks"):
        log_steps("wandb", tmp_path, 1, fail=True)
    log_steps("wandb", tmp_path, 1)

    broken, whole = wandb_records(tmp_path, 2)
    exits = [[r.exit.exit_code for r in run if kind_of(r) == "exit"] for run in (broken, whole)]
    assert exits == [[1], [0]]
    ids = [[r.run.run_id for r in run if kind_of(r) == "run"] for run in (broken, whole)]
    assert ids[0] != ids[1]


def test_wandb_that_cannot_start_is_an_error_with_the_remedy(tmp_path, monkeypatch):
    def refuse(**settings):
        raise wandb.errors.UsageError("api_key not configured")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ConfigError, match=naming("api_key", "WANDB_MODE=offline")):
        log_steps("wandb", tmp_path, 1)
