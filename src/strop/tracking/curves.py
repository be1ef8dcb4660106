"""The picture of a run: its main metrics over the steps, read from ``metrics.jsonl``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strop.errors import DataError
from strop.tracking.figures import COLOURS, agg_figure, plain_axes, save_figure
from strop.tracking.jsonl import METRICS_FILE, read_metrics
from strop.tracking.text import VALIDATION_PREFIX, names_in_order

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVES_FILE = "curves.png"
PANELS_PER_ROW = 3
SMOOTH_FROM = 40
"""A curve of this many points or more is drawn faintly, with its running mean on top."""

Steps = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Panel:
    """One small graph: metrics by legend label, and optionally a band between two more."""

    title: str
    unit: str
    curves: Mapping[str, str]
    band: tuple[str, str] | None = None
    limits: tuple[float, float] | None = None
    """The ends of the vertical axis; None: matplotlib's choice."""


PANELS = (
    Panel(
        "Reward",
        "mean per response",
        {"score": "critic/score/mean", "less KL penalty": "critic/rewards/mean"},
    ),
    Panel(
        "Response length",
        "tokens",
        {"mean": "response_length/mean"},
        band=("response_length/min", "response_length/max"),
    ),
    Panel(
        "Cut at the length limit",
        "share of responses",
        {"cut": "response_length/clip_ratio"},
        limits=(-0.04, 1.04),
    ),
    Panel(
        "KL to the reference model",
        "nats per token",
        {"sampled": "critic/kl", "in the loss": "actor/kl_loss"},
    ),
    Panel("KL of an update", "nats per token", {"update": "policy/approxkl_avg"}),
    Panel("Entropy", "nats per token", {"entropy": "actor/entropy_loss"}),
    Panel("Losses", "loss", {"policy": "actor/pg_loss", "value": "critic/vf_loss"}),
    Panel(
        "Clipped tokens", "share of tokens", {"policy": "actor/pg_clipfrac", "value": "critic/vf_clipfrac"}
    ),
    # Before the critic has learned anything, it can be millions below 0.
    Panel(
        "Explained variance of the values",
        "1 is perfect",
        {"values": "critic/vf_explained_var"},
        limits=(-1.08, 1.08),
    ),
    Panel("Gradient norm", "before clipping", {"policy": "actor/grad_norm", "value": "critic/grad_norm"}),
    Panel("Throughput", "tokens per second", {"throughput": "perf/throughput"}),
)

SUPERVISED_PANELS = (
    Panel("Loss", "per token or pair", {"training": "train/loss", "validation": "val/loss"}),
    Panel(
        "Accuracy",
        "share of pairs in order",
        {"training": "train/accuracy", "validation": "val/accuracy"},
        limits=(-0.04, 1.04),
    ),
    Panel("Margin", "chosen less rejected score", {"training": "train/margin", "validation": "val/margin"}),
    Panel(
        "Accuracy of the implicit rewards",
        "share of pairs in order",
        {"training": "train/rewards/accuracy", "validation": "val/rewards/accuracy"},
        limits=(-0.04, 1.04),
    ),
    Panel(
        "Margin of the implicit rewards",
        "chosen less rejected reward",
        {"training": "train/rewards/margin", "validation": "val/rewards/margin"},
    ),
    Panel("Calibration error", "share of pairs", {"validation": "val/ece"}),
    Panel("Gradient norm", "before clipping", {"model": "grad_norm"}),
)
"""Panels of fine-tuning and reward modelling; reinforcement learning logs none of these metrics."""


def draw_curves(run_dir: Path | str) -> Path:
    """Draw ``curves.png`` in the run folder, one panel per main metric that the run logged; return its path.

    Raises DataError when the folder has no readable ``metrics.jsonl`` or it holds no steps.
    """
    run_dir = Path(run_dir)
    path = run_dir / METRICS_FILE
    steps = read_metrics(path)
    if not steps:
        raise DataError(f"{path} holds no steps yet")
    names = names_in_order(steps)
    panels = drawn_panels(names)
    if not panels:
        raise DataError(f"{path}: has none of the metrics that are drawn; found {names}")
    n_columns = min(PANELS_PER_ROW, len(panels))
    n_rows = math.ceil(len(panels) / n_columns)
    figure = agg_figure(4.6 * n_columns, 2.9 * n_rows + 0.5)
    axes = figure.subplots(n_rows, n_columns, squeeze=False).flatten()
    for ax, panel in zip(axes, panels, strict=False):
        _draw_panel(ax, panel, steps)
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    for ax in axes[max(len(panels) - n_columns, 0) : len(panels)]:
        ax.set_xlabel("step")
    figure.suptitle(f"{run_dir.resolve().name}, {steps[-1]['step']} steps", fontsize=13, fontweight="bold")
    return save_figure(figure, run_dir / CURVES_FILE)


def drawn_panels(names: Sequence[str]) -> list[Panel]:
    """Return the panels that a run with metrics ``names`` has, with one of its validation scores."""
    validation = {
        name.removeprefix(VALIDATION_PREFIX): name for name in names if name.startswith(VALIDATION_PREFIX)
    }
    panels = [*PANELS[:1], Panel("Validation", "mean score", validation), *SUPERVISED_PANELS, *PANELS[1:]]
    return [panel for panel in panels if any(name in names for name in panel.curves.values())]


def series(steps: Steps, name: str) -> tuple[list[int], list[float]]:
    """Return step numbers and values of a metric, where it was logged and is finite."""
    points = [(step["step"], step[name]) for step in steps if math.isfinite(step.get(name, math.nan))]
    return [number for number, _ in points], [value for _, value in points]


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the mean over ``window`` values (an odd number) around each, fewer at the ends: no lag."""
    around = slice(window // 2, window // 2 + len(values))
    sums, counts = (np.convolve(each, np.ones(window))[around] for each in (values, np.ones(len(values))))
    return (sums / counts).tolist()


def draw_curve(ax: Axes, numbers: list[int], values: list[float], *, label: str, colour: str) -> None:
    """Draw one metric: with markers when short, with its running mean when long."""
    if len(values) < SMOOTH_FROM:
        marker = "o" if len(values) <= 25 else None
        ax.plot(numbers, values, color=colour, lw=1.8, marker=marker, ms=5, label=label)
        return
    ax.plot(numbers, values, color=colour, lw=0.8, alpha=0.3)
    smooth = running_mean(values, window=2 * (len(values) // 40) + 1)
    ax.plot(numbers, smooth, color=colour, lw=1.8, label=label)


def _draw_panel(ax: Axes, panel: Panel, steps: Steps) -> None:
    drawn = [(label, series(steps, name)) for label, name in panel.curves.items()]
    drawn = [entry for entry in drawn if entry[1][0]]
    # Without a KL penalty the reward is the score itself: one curve is enough.
    drawn = [entry for at, entry in enumerate(drawn) if entry[1] not in [other[1] for other in drawn[:at]]]
    if panel.band is not None:
        (low_steps, lows), (_, highs) = (series(steps, name) for name in panel.band)
        if low_steps and len(lows) == len(highs):
            ax.fill_between(low_steps, lows, highs, color=COLOURS[0], alpha=0.12, lw=0, label="min to max")
    for number, (label, (numbers, values)) in enumerate(drawn):
        draw_curve(ax, numbers, values, label=label, colour=COLOURS[number % len(COLOURS)])
    plain_axes(ax, panel.title, panel.unit)
    ax.locator_params(axis="x", nbins=6, steps=[1, 2, 5, 10], integer=True)
    if panel.limits is not None:
        ax.set_ylim(*panel.limits)
    if len(ax.get_legend_handles_labels()[1]) > 1 or panel.title == "Validation":
        ax.legend(loc="best", frameon=False, fontsize=8)  # the default warns after 1 s
