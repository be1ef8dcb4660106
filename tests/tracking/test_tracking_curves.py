"""The pictures: they decode and show what was logged."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from strop.errors import DataError
from strop.tracking.curves import draw_curves, drawn_panels, running_mean
from strop.tracking.figures import COLOURS


def pixels(path: Path) -> np.ndarray:
    image = imread(path)[:, :, :3]
    assert len(np.unique(image.reshape(-1, 3), axis=0)) > 20, "blank"
    return image


def pixels_of(image: np.ndarray, colour: str) -> np.ndarray:
    """Mask of the pixels in a colour such as #0072b2."""
    wanted = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.abs(image - wanted).max(axis=2) < 0.02


def has_colour(image: np.ndarray, colour: str) -> bool:
    return bool(pixels_of(image, colour).sum() > 50)


@pytest.fixture
def drawn(track, tmp_path):
    """drawn(name, steps, {metric: function of the step}) -> the pixels of the run's picture."""

    def draw(name: str, n_steps: int, curves: dict[str, Callable[[int], float]]) -> np.ndarray:
        with track(tmp_path / name) as tracking:
            for step in range(1, n_steps + 1):
                tracking.log(step, {metric: value(step) for metric, value in curves.items()})
        return pixels(draw_curves(tmp_path / name))

    return draw


def test_a_running_mean_is_that_of_the_values_around_each():
    values = [math.sin(at) for at in range(500)]
    for window in (3, 25):
        shares = [values[max(at - window // 2, 0) : at + window // 2 + 1] for at in range(500)]
        assert running_mean(values, window) == pytest.approx([sum(share) / len(share) for share in shares])


def test_a_run_of_dpo_has_panels_of_its_own_metrics():
    names = ("train/rewards/accuracy", "val/rewards/accuracy", "train/rewards/margin", "val/rewards/margin")
    drawn = {name for panel in drawn_panels(names) for name in panel.curves.values() if name in names}
    assert drawn == {*names}


def rising(step: int) -> float:
    return step / 60 + 0.05 * (step % 2)


def test_the_picture_has_a_panel_for_each_main_metric_that_was_logged(drawn, tmp_path):
    names = ("critic/score/mean", "val/test_score/x", "actor/grad_norm", "perf/throughput", "timing_s/gen")
    curves = dict.fromkeys(names, rising)
    one = drawn("one", 60, {name: curves[name] for name in ("critic/score/mean", "timing_s/gen")})
    three = drawn("three", 60, {name: curves[name] for name in names[:3]})
    four = drawn("four", 60, curves)
    assert three.shape[1] == pytest.approx(3 * one.shape[1], abs=3)
    assert three.shape[0] == one.shape[0]
    assert four.shape[0] > 1.7 * three.shape[0]
    assert (tmp_path / "one" / "curves.png").is_file()


def test_two_metrics_of_a_panel_are_two_curves(drawn):
    one = drawn("one", 30, {"actor/grad_norm": rising})
    both = drawn("both", 30, {"actor/grad_norm": rising, "critic/grad_norm": lambda step: 40 - step})
    assert [has_colour(one, colour) for colour in COLOURS[:2]] == [True, False]
    assert [has_colour(both, colour) for colour in COLOURS[:2]] == [True, True]


def test_any_number_of_validation_sets_is_drawn(drawn):
    curves = {f"val/test_score/set{i}": lambda step, i=i: rising(step) + i for i in range(9)}
    assert has_colour(drawn("many", 6, curves), COLOURS[0])


@pytest.mark.parametrize("n_steps", [1, 2, 39, 40, 400])
def test_short_and_long_runs_are_drawn(drawn, n_steps):
    curves = {"critic/score/mean": rising, "critic/vf_explained_var": rising}
    assert has_colour(drawn("run", n_steps, curves), COLOURS[0])


def test_values_that_are_not_finite_leave_no_gap(drawn):
    values = {50: math.nan, 60: math.inf}
    image = drawn("run", 100, {"actor/grad_norm": lambda step: values.get(step, 0.5 + (step % 20) / 100)})
    columns = np.flatnonzero(pixels_of(image, COLOURS[0]).any(axis=0))
    assert np.diff(columns).max() == 1


def test_mistakes_are_named(drawn, tmp_path):
    with pytest.raises(DataError, match="cannot read"):
        draw_curves(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(DataError, match="no steps"):
        draw_curves(tmp_path)
    with pytest.raises(DataError, match="none of the metrics"):
        drawn("other", 3, {"timing_s/gen": rising})


def test_a_running_mean_is_centred_and_shorter_at_the_ends():
    assert running_mean([1, 2, 3, 4, 8], window=3) == [1.5, 2, 3, 5, 6]
    assert running_mean([1, 5], window=1) == [1, 5]
