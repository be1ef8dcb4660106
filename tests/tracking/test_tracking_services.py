"""Trackio, MLflow and SwanLab: what the packages themselves read back from their files."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.image import imsave

from strop.tracking.report import ShownPair, ValidationReport

LINK = "https://hub.example/ada/first/tree/v1"
PAIRS = ValidationReport(1, {}, [ShownPair("sums", "1+1=", "2", "3", 0.5, -0.25)])


@pytest.fixture
def logged(tmp_path, track):
    """logged(name): a run of steps 0 to 2, and its resume after step 1; returns the folder."""

    def log(name):
        imsave(tmp_path / "picture.png", np.zeros((20, 30, 3)))
        for start, steps in ((0, (0, 1, 2)), (1, (2, 3))):
            settings = {"config": {"lr": 0.5}, "start_step": start, "hf_repo_url": LINK}
            with track(tmp_path, [name], **settings) as tracking:
                for step in steps:
                    tracking.log(step, {"reward": step / 8 + start, "val/a@8": math.nan})
                tracking.log_validation(steps[-1], PAIRS)
                tracking.log_image(steps[-1], "data/token_lengths", tmp_path / "picture.png")
                assert not any(tracking._failures.values())
        return tmp_path

    return log


def test_mlflow_continues_a_run_and_marks_its_end(logged, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="needs strop[mlflow]")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = logged("mlflow")
    client = mlflow.MlflowClient((folder / "mlflow").as_uri())
    run_id = (folder / "mlflow_run_id.txt").read_text().strip()
    found = client.get_run(run_id)
    assert (found.info.status, found.info.run_name) == ("FINISHED", "experiment")
    assert found.data.tags["hf_repo_url"] == LINK
    values = [(one.step, one.value) for one in client.get_metric_history(run_id, "reward")]
    assert sorted(values) == [(0, 0.0), (1, 0.125), (2, 0.25), (2, 1.25), (3, 1.375)]
    assert "val/a_8" in found.data.metrics
    table = mlflow.artifacts.load_dict(f"{found.info.artifact_uri}/val/preferences/step_000003.json")
    assert table["rows"][0]["rejected_score"] == -0.25
    assert run_id in json.loads((folder / "trackers.json").read_text())["mlflow"]


def test_names_that_are_folders_of_others_are_kept_in_files_of_mlflow(tmp_path, track, monkeypatch):
    """As ``val/accuracy`` and ``val/accuracy/<source>`` of reward models."""
    mlflow = pytest.importorskip("mlflow", reason="needs strop[mlflow]")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with track(tmp_path, ["mlflow"]) as tracking:
        tracking.log(1, {"val/accuracy": 0.5, "val/accuracy/x/y": 0.25, "val/margin": 1.0})
        assert not any(tracking._failures.values())
    client = mlflow.MlflowClient((tmp_path / "mlflow").as_uri())
    found = client.get_run((tmp_path / "mlflow_run_id.txt").read_text().strip()).data.metrics
    assert found == {"val/accuracy": 0.5, "val/accuracy.x.y": 0.25, "val/margin": 1.0}


def test_mlflow_without_a_server_is_an_error_with_the_remedy(tmp_path, track, monkeypatch):
    pytest.importorskip("mlflow", reason="needs strop[mlflow]")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ValueError, match="MLFLOW_TRACKING_URI"):
        track(tmp_path, ["mlflow"])


def test_trackio_continues_a_run(logged, monkeypatch, tmp_path):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read once, by the import
    pytest.importorskip("trackio", reason="needs strop[trackio]")
    folder = logged("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = SQLiteStorage.get_runs("project")
    assert run == "experiment"
    rows = [row for row in SQLiteStorage.get_logs("project", run) if "reward" in row]
    assert sorted((row["step"], row["reward"]) for row in rows) == [
        (0, 0.0), (1, 0.125), (2, 0.25), (2, 1.25), (3, 1.375)
    ]  # fmt: skip
    assert SQLiteStorage.get_run_config("project", run)["hf_repo_url"] == LINK
    assert (folder / "trackio" / "project.db").is_file()


def test_swanlab_keeps_an_offline_run_in_the_run_folder(logged, monkeypatch):
    pytest.importorskip("swanlab", reason="needs strop[swanlab]")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    folder = logged("swanlab")
    runs = sorted((folder / "swanlab").glob("run-*"))
    assert len(runs) == 2  # offline, a resume is a run of its own
    for run in runs:
        assert LINK in (run / "files" / "config.yaml").read_text()
        assert "rejected: 3" in next(run.glob("media/text/*.txt")).read_text()
        assert list(run.glob("media/image/*.png"))
        assert list(run.glob("*.swanlab"))


def test_swanlab_gets_no_credential_of_the_command(tmp_path):
    pytest.importorskip("swanlab", reason="needs strop[swanlab]")
    program = """
import sys
from pathlib import Path
from strop.tracking import Tracking
names = {"project_name": "project", "experiment_name": "experiment"}
with Tracking(["swanlab"], run_dir=Path(sys.argv[1]), config={"lr": 0.5}, total_steps=1, **names) as tracking:
    tracking.log(1, {"reward": 0.5})
"""
    command = [sys.executable, "-c", program, str(tmp_path), "--api-key", "Swordfish"]
    subprocess.run(command, check=True, env=os.environ | {"SWANLAB_MODE": "offline"})
    files = [path for path in (tmp_path / "swanlab").rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if b"Swordfish" in path.read_bytes()] == []
