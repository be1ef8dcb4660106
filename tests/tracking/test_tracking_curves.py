"""The pictures: they decode, show what was logged, and leave pyplot alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from strop.errors import DataError
from strop.tracking import Tracking
from strop.tracking.curves import COLOURS, draw_curves, running_mean

WHITE = np.array([1.0, 1.0, 1.0])


def write_run(folder: Path, n_steps: int, *metrics: str, slope: float = 1.0) -> Path:
    names = {"project_name": "p", "experiment_name": "e"}
    with Tracking([], run_dir=folder, config={}, total_steps=n_steps, **names) as tracking:
        for step in range(1, n_steps + 1):
            value = slope * step / n_steps + 0.05 * (step % 2)
            tracking.log(step, dict.fromkeys(metrics, value))
    return folder


def pixels(path: Path) -> np.ndarray:
    image = imread(path)[:, :, :3]
    assert len(np.unique(image.reshape(-1, 3), axis=0)) > 20, "blank"
    return image


def has_colour(image: np.ndarray, colour: str) -> bool:
    wanted = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return bool((np.abs(image - wanted).max(axis=2) < 0.02).sum() > 50)


def test_the_picture_has_a_panel_for_each_main_metric_that_was_logged(tmp_path):
    one = pixels(draw_curves(write_run(tmp_path / "a", 60, "critic/score/mean", "timing_s/gen")))
    three = pixels(
        draw_curves(write_run(tmp_path / "b", 60, "critic/score/mean", "val/test_score/x", "actor/grad_norm"))
    )
    four = pixels(
        draw_curves(
            write_run(
                tmp_path / "c", 60, "critic/score/mean", "critic/kl", "actor/pg_loss", "perf/throughput"
            )
        )
    )
    assert three.shape[1] == pytest.approx(3 * one.shape[1], abs=3)
    assert three.shape[0] == one.shape[0]
    assert four.shape[0] > 1.7 * three.shape[0]
    assert (tmp_path / "a" / "curves.png").is_file()


def test_two_metrics_of_a_panel_are_two_curves(tmp_path):
    one = pixels(draw_curves(write_run(tmp_path, 30, "actor/grad_norm")))
    assert has_colour(one, COLOURS[0])
    assert not has_colour(one, COLOURS[1])
    with Tracking(
        [], run_dir=tmp_path / "2", project_name="p", experiment_name="e", config={}, total_steps=9
    ) as t:
        for step in range(1, 31):
            t.log(step, {"actor/grad_norm": step, "critic/grad_norm": 40 - step})
    both = pixels(draw_curves(tmp_path / "2"))
    assert has_colour(both, COLOURS[0])
    assert has_colour(both, COLOURS[1])


@pytest.mark.parametrize("n_steps", [1, 2, 39, 40, 400])
def test_short_and_long_runs_are_drawn(tmp_path, n_steps):
    image = pixels(draw_curves(write_run(tmp_path, n_steps, "critic/score/mean", "critic/vf_explained_var")))
    assert has_colour(image, COLOURS[0])


def blue_of_a_run(folder: Path, values: dict[int, float]) -> np.ndarray:
    """Which pixels hold the curve of 100 steps around 0.5, with ``values`` in some steps instead."""
    names = {"project_name": "p", "experiment_name": "e"}
    with Tracking([], run_dir=folder, config={}, total_steps=100, **names) as tracking:
        for step in range(1, 101):
            tracking.log(step, {"actor/grad_norm": values.get(step, 0.5 + (step % 20) / 100)})
    image = pixels(draw_curves(folder))
    return np.abs(image - np.array([0, 0x72, 0xB2]) / 255).max(axis=2) < 0.02


def test_values_that_are_not_finite_leave_no_gap(tmp_path):
    columns = np.flatnonzero(blue_of_a_run(tmp_path, {50: float("nan"), 60: float("inf")}).any(axis=0))
    assert np.diff(columns).max() == 1


def test_mistakes_are_named(tmp_path):
    with pytest.raises(DataError, match="cannot read"):
        draw_curves(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(DataError, match="no steps"):
        draw_curves(tmp_path)
    with pytest.raises(DataError, match="none of the metrics"):
        draw_curves(write_run(tmp_path / "other", 3, "timing_s/gen"))


def test_a_running_mean_is_centred_and_shorter_at_the_ends():
    assert running_mean([1, 2, 3, 4, 8], window=3) == [1.5, 2, 3, 5, 6]
    assert running_mean([1, 5], window=1) == [1, 5]


def test_drawing_leaves_pyplot_alone(tmp_path):
    write_run(tmp_path, 3, "critic/score/mean")
    code = "import sys; from strop.tracking.curves import draw_curves; draw_curves(sys.argv[1]); "
    code += "print('matplotlib.pyplot' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False False"
