"""The timeline: idle shares by hand and in total, and the bars and labels of the picture."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from matplotlib.image import imread

from strop.errors import DataError
from strop.tracking.timeline import (
    Interval,
    Timeline,
    busy_seconds,
    draw_timeline,
    idle_shares,
    timeline_figure,
    window,
)
from strop.trainer.metrics import PhaseTimer

START = 1_000_000.0


def at(
    lane: str, name: str, start: float, end: float, iteration: int, version: int | None = None
) -> Interval:
    return Interval(lane, name, START + start, START + end, iteration, version)


# The learner waits in [2, 3], [5, 5.5] and is checkpointing inside of [4, 5]; the rollout waits in [6, 7].
PIPELINE = [
    at("rollout", "gen", 0, 3, 1, 0),
    at("rollout", "gen", 3, 6, 2, 0),
    at("rollout", "wait_weights", 6, 7, 3),
    at("rollout", "gen", 7, 9, 3, 1),
    at("learner", "wait_samples", 1, 3, 1),
    at("learner", "update_actor", 3, 5, 1),
    at("learner", "save_checkpoint", 4, 5, 1),
    at("learner", "update_actor", 5.5, 8, 2),
]


def test_idle_shares_by_hand():
    assert window(PIPELINE) == (START + 1, START + 8)  # both lanes are known there
    assert idle_shares(PIPELINE) == {
        "rollout": pytest.approx(1 / 7),
        "learner": pytest.approx((2 + 0.5) / 7),
    }


def test_lanes_that_never_overlap_share_the_whole_time():
    one_iteration = [at("rollout", "gen", 0, 3, 1), at("learner", "update_actor", 3, 4, 1)]
    assert window(one_iteration) == (START, START + 4)
    assert idle_shares(one_iteration) == {"rollout": pytest.approx(0.25), "learner": pytest.approx(0.75)}


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["gen", "reward", "wait_samples"]), st.integers(0, 60), st.integers(0, 20)),
        min_size=1,
        max_size=12,
    )
)
def test_busy_and_idle_seconds_add_up(phases):
    intervals = [at("learner", name, start, start + length, 1) for name, start, length in phases]
    seconds = np.zeros(100, dtype=int)  # 1: busy, 2: waiting, which a phase around it does not hide
    for name, start, length in phases:
        covered = slice(start, start + length)
        seconds[covered] = np.maximum(seconds[covered], 2 if name == "wait_samples" else 1)
    start, end = window(intervals)
    assert busy_seconds(intervals, start, end) == pytest.approx((seconds == 1).sum(), abs=1e-6)
    idle = idle_shares(intervals)["learner"] * (end - start)
    assert idle + busy_seconds(intervals, start, end) == pytest.approx(end - start, abs=1e-6)


def test_the_picture_has_a_bar_for_each_interval_in_the_row_of_its_lane():
    (ax,) = timeline_figure(PIPELINE).axes
    bars = sorted((bar.get_y() + 0.3, bar.get_x() + 1, bar.get_width()) for bar in ax.patches)
    expected = sorted((one.lane != "rollout", one.start - START, one.end - one.start) for one in PIPELINE)
    assert np.allclose(bars, np.array(expected, dtype=float), atol=1e-6)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["rollout", "learner"]
    assert "Iterations 1 to 3, 7.0 s. Idle: rollout 14%, learner 36%" in ax.get_title(loc="left")
    waiting = [bar for bar in ax.patches if bar.get_hatch()]
    assert sorted(bar.get_x() + 1 for bar in waiting) == pytest.approx([1, 6])
    colours = {to_hex(bar.get_facecolor()) for bar in ax.patches if not bar.get_hatch()}
    assert len(colours) == 3  # generation, update, checkpoint
    texts = [text.get_text() for text in ax.texts]
    assert [text for text in texts if text.startswith("v")] == ["v0", "v1"]  # the first is out of sight
    assert sorted(text for text in texts if text.isdigit()) == ["1", "1", "2", "2"]  # 3: half is out of sight


def test_the_last_iterations_are_kept_while_threads_add():
    timeline = Timeline(iterations=5)

    def add(lane: str) -> None:
        for number in range(1, 101):
            timeline.add(at(lane, "gen", number, number + 1, number))

    threads = [threading.Thread(target=add, args=(lane,)) for lane in ("rollout", "learner")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept = timeline.intervals()
    assert [one.iteration for one in kept] == sorted([*range(96, 101)] * 2)
    assert [one.start for one in kept] == sorted(one.start for one in kept)


def test_phases_of_a_timer_become_intervals_that_last_as_long():
    timer, of_the_samples, timeline = PhaseTimer(), PhaseTimer(), Timeline()
    with timer.phase("step"):
        with of_the_samples.phase("gen"), of_the_samples.phase("sync_weights"):
            sum(range(1000))
        timer.add(of_the_samples)
    assert of_the_samples.intervals == []
    timeline.add_phases("run", timer.intervals, 4)
    seconds = timer.take()
    assert timer.intervals == []
    found = {one.name: one for one in timeline.intervals()}
    assert found.keys() == {"gen", "sync_weights"}
    for name, one in found.items():
        assert (one.lane, one.iteration) == ("run", 4)
        assert one.seconds == pytest.approx(seconds[f"timing_s/{name}"], abs=1e-5)
    assert found["gen"].start <= found["sync_weights"].start <= found["sync_weights"].end <= found["gen"].end


def test_twenty_crowded_iterations_are_drawn(tmp_path):
    draw, now, intervals = random.Random(0), 0.0, []
    for number in range(80, 100):
        for name in ("gen", "reward", "values", "adv", "update_critic", "update_actor", "testing", "unknown"):
            end = now + draw.uniform(0, 2)
            intervals.append(at("run", name, now, end, number))
            now = end
    path = draw_timeline(intervals, tmp_path / "timeline.png")
    assert len(np.unique(imread(path).reshape(-1, 4), axis=0)) > 20
    with pytest.raises(DataError, match="no intervals"):
        draw_timeline([], path)
