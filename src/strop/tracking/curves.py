"""The picture of a run: its main metrics over the steps, read from ``metrics.jsonl``.

Drawn with matplotlib's Figure objects and the Agg renderer: no display is needed, and pyplot's global
state, which a notebook or a user's reward function may be using, stays untouched.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.errors import DataError
from strop.files import atomic_path
from strop.tracking.jsonl import METRICS_FILE, read_metrics
from strop.tracking.text import VALIDATION_PREFIX, names_in_order

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES_FILE = "curves.png"
PANELS_PER_ROW = 3
SMOOTH_FROM = 40
"""A curve of this many points or more is drawn faintly, with its running mean on top."""

WILD_BEYOND = 4.0
"""Values are cut off when they stretch the axis to more than this many times the middle 96% of them."""

# Okabe and Ito's palette: told apart also by colour-blind readers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")

Steps = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Panel:
    """One small graph: metrics by legend label, and optionally a band between two more."""

    title: str
    unit: str
    curves: Mapping[str, str]
    band: tuple[str, str] | None = None
    low: float | None = None
    """The lower end of the vertical axis; None: as the values ask."""
    high: float | None = None

    def clamped(self, values: Sequence[float]) -> list[float]:
        """Values beyond the ends stand at the ends, so that a wild one does not reach into a running mean."""
        low, high = -math.inf if self.low is None else self.low, math.inf if self.high is None else self.high
        return [min(max(value, low), high) for value in values]


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
        low=0.0,
        high=1.0,
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
    # Before the values have learned anything it can be millions below 0.
    Panel(
        "Explained variance of the values",
        "1 is perfect",
        {"values": "critic/vf_explained_var"},
        low=-1.0,
        high=1.0,
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
        low=0.0,
        high=1.0,
    ),
    Panel("Margin", "chosen less rejected score", {"training": "train/margin", "validation": "val/margin"}),
    Panel("Calibration error", "share of pairs", {"validation": "val/ece"}, low=0.0),
    Panel("Gradient norm", "before clipping", {"model": "grad_norm"}),
)
"""Of fine-tuning and reward modelling, which no run of reinforcement learning logs."""


def draw_curves(run_dir: Path | str) -> Path:
    """Draw ``curves.png`` in the run folder, with a panel for each main metric that the run logged;
    returns its path.

    Raises DataError when the folder has no readable ``metrics.jsonl`` or no steps in it.
    """
    run_dir = Path(run_dir)
    steps = _steps_of(run_dir)
    names = names_in_order(steps)
    validation = {
        name.removeprefix(VALIDATION_PREFIX): name for name in names if name.startswith(VALIDATION_PREFIX)
    }
    panels = [*PANELS[:1], Panel("Validation", "mean score", validation), *SUPERVISED_PANELS, *PANELS[1:]]
    panels = [panel for panel in panels if any(name in names for name in panel.curves.values())]
    if not panels:
        raise DataError(
            f"{run_dir / METRICS_FILE}: none of the metrics that curves are drawn of; found {names}"
        )
    n_columns = min(PANELS_PER_ROW, len(panels))
    n_rows = math.ceil(len(panels) / n_columns)
    figure = _new_figure(width=4.6 * n_columns, height=2.9 * n_rows + 0.5)
    axes = figure.subplots(n_rows, n_columns, squeeze=False).flatten()
    for ax, panel in zip(axes, panels, strict=False):
        _draw_panel(ax, panel, steps)
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    for ax in axes[max(len(panels) - n_columns, 0) : len(panels)]:
        ax.set_xlabel("step")
    figure.suptitle(f"{run_dir.resolve().name}, {steps[-1]['step']} steps", fontsize=13, fontweight="bold")
    return _save(figure, run_dir / CURVES_FILE)


def draw_comparison(
    runs: Mapping[str, Path | str], key: str, out: Path | str, *, title: str | None = None
) -> Path:
    """Draw the metric ``key`` of several runs (label -> run folder) in one graph at ``out``; returns its
    path.

    Raises DataError when a folder is not a run or did not log ``key``.
    """
    figure = _new_figure(width=7.5, height=4.5)
    ax = figure.subplots()
    for number, (label, run_dir) in enumerate(runs.items()):
        steps = _steps_of(Path(run_dir))
        if not any(key in step for step in steps):
            raise DataError(f"{run_dir}: logged no {key!r}; it has {', '.join(names_in_order(steps))}")
        _draw_curve(ax, *_series(steps, key), label=label, colour=COLOURS[number % len(COLOURS)])
    _style(ax, title or key)
    ax.set_xlabel("step")
    ax.set_ylabel(key)
    ax.legend(frameon=False)
    return _save(figure, Path(out))


def _steps_of(run_dir: Path) -> Steps:
    steps = read_metrics(run_dir / METRICS_FILE)
    if not steps:
        raise DataError(f"{run_dir / METRICS_FILE} holds no steps yet")
    return steps


def _series(steps: Steps, name: str) -> tuple[list[int], list[float]]:
    """Step numbers and values of a metric, where it was logged and is finite."""
    points = [(step["step"], step[name]) for step in steps if math.isfinite(step.get(name, math.nan))]
    return [number for number, _ in points], [value for _, value in points]


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean over ``window`` values (an odd number) around each, fewer at the ends: no lag."""
    reach = window // 2
    shares = [values[max(at - reach, 0) : at + reach + 1] for at in range(len(values))]
    return [sum(share) / len(share) for share in shares]


def _draw_panel(ax: Axes, panel: Panel, steps: Steps) -> None:
    drawn = [(label, _series(steps, name)) for label, name in panel.curves.items()]
    drawn = [(label, (at, panel.clamped(values))) for label, (at, values) in drawn if at]
    # The reward with the KL penalty is the reward itself when there is no penalty.
    drawn = [entry for at, entry in enumerate(drawn) if entry[1] not in [other[1] for other in drawn[:at]]]
    if panel.band is not None:
        (low_steps, lows), (_, highs) = (_series(steps, name) for name in panel.band)
        if low_steps and len(lows) == len(highs):
            ax.fill_between(low_steps, lows, highs, color=COLOURS[0], alpha=0.12, lw=0, label="min to max")
    for number, (label, (numbers, values)) in enumerate(drawn):
        _draw_curve(ax, numbers, values, label=label, colour=COLOURS[number])
    _style(ax, panel.title)
    ax.set_ylabel(panel.unit)
    _limit_height(ax, panel, [value for _, (_, values) in drawn for value in values])
    if len(ax.get_legend_handles_labels()[1]) > 1 or panel.title == "Validation":
        ax.legend(frameon=False, fontsize=8)


def _draw_curve(ax: Axes, numbers: list[int], values: list[float], *, label: str, colour: str) -> None:
    if len(values) < SMOOTH_FROM:
        marker = "o" if len(values) <= 25 else None
        ax.plot(numbers, values, color=colour, lw=1.8, marker=marker, ms=4, label=label)
        return
    ax.plot(numbers, values, color=colour, lw=0.8, alpha=0.3)
    smooth = running_mean(values, window=2 * (len(values) // 40) + 1)
    ax.plot(numbers, smooth, color=colour, lw=1.8, label=label)


def _limit_height(ax: Axes, panel: Panel, values: list[float]) -> None:
    """Fixed ends where the panel has them; and a few wild values of a long curve do not flatten the rest."""
    low, high = panel.low, panel.high
    if len(values) >= SMOOTH_FROM:
        in_order = sorted(values)
        cut = len(values) // 50
        usual_low, usual_high = in_order[cut], in_order[-1 - cut]
        if in_order[-1] - in_order[0] > WILD_BEYOND * (usual_high - usual_low) > 0:
            low, high = (usual_low if low is None else low), (usual_high if high is None else high)
    margin = 0.0 if low is None or high is None else 0.04 * (high - low)
    ax.set_ylim(None if low is None else low - margin, None if high is None else high + margin)


def _style(ax: Axes, title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.set_title(title, fontsize=11, loc="left")
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25, lw=0.6)
    ax.tick_params(labelsize=9)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True))
    ax.margins(x=0.02)


def _new_figure(*, width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path) -> Path:
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=130)
    return path
