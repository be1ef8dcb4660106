"""The picture of a run's last iterations: when its sides generated, learned and waited."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from strop.errors import DataError
from strop.tracking.figures import COLOURS, agg_figure, plain_axes, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TIMELINE_FILE = "timeline.png"
ITERATIONS = 20
"""Iterations that the picture shows: more could not be distinguished."""

_PHASES = {
    "generate": (COLOURS[0], ("gen", "gen_greedy")),
    "scores": (COLOURS[2], ("reward",)),
    "log-probs, values, advantages": (COLOURS[5], ("old_log_prob", "ref", "values", "adv")),
    "update critic": (COLOURS[3], ("update_critic",)),
    "update actor": (COLOURS[1], ("update_actor", "update")),
    "weights": (COLOURS[4], ("sync_weights", "verify_weights", "take_weights")),
    "validate": ("#999933", ("testing",)),
    "write files": (COLOURS[6], ("save_checkpoint", "log_rollouts")),
}
"""Entry of the legend -> its colour, and the names of its phases."""
_KIND_OF = {name: kind for kind, (_, names) in _PHASES.items() for name in names}
_COLOUR_OF = {kind: colour for kind, (colour, _) in _PHASES.items()} | {"other": "#9a9a9a"}
_WAITING = "wait"
_ENVELOPE = "step"
"""The phase around the others of an iteration."""

_LANE_INCHES, _WIDTH_INCHES = 0.95, 15.0
_LETTER_INCHES = 0.075


class Interval(NamedTuple):
    """A phase of one side of a run."""

    lane: str
    """The side: ``rollout``, ``learner``."""
    name: str
    """The phase, as in ``timing_s/<name>``; names that begin with ``wait`` are idle time."""
    start: float
    """Seconds of ``time.time()``, which processes share."""
    end: float
    iteration: int
    """The batch of the interval: the iteration that learns from it."""
    version: int | None = None
    """The version of the policy that a rollout holds from the start of the interval on."""

    @property
    def seconds(self) -> float:
        """Length."""
        return self.end - self.start

    @property
    def is_waiting(self) -> bool:
        """True if the side was idle."""
        return self.name.startswith(_WAITING)


class Timeline:
    """Intervals of the last iterations; several threads may add some at the same time."""

    def __init__(self, iterations: int = ITERATIONS) -> None:
        self._iterations = iterations
        self._by_iteration: defaultdict[int, list[Interval]] = defaultdict(list)
        self._lock = Lock()

    def add(self, *intervals: Interval) -> None:
        """Add intervals, and forget those of iterations that are too old."""
        with self._lock:
            for interval in intervals:
                self._by_iteration[interval.iteration].append(interval)
            newest = max(self._by_iteration, default=0)
            for old in [number for number in self._by_iteration if number <= newest - self._iterations]:
                del self._by_iteration[old]

    def add_phases(self, lane: str, phases: Iterable[tuple[str, float, float]], iteration: int) -> None:
        """Add the ``intervals`` of a ``PhaseTimer``, without the one around all others."""
        self.add(*(Interval(lane, *phase, iteration) for phase in phases if phase[0] != _ENVELOPE))

    def intervals(self) -> list[Interval]:
        """Return the intervals by start."""
        with self._lock:
            held = [interval for group in self._by_iteration.values() for interval in group]
        return sorted(held, key=lambda interval: interval.start)


def window(intervals: Sequence[Interval]) -> tuple[float, float]:
    """Return start and end of the time in which every lane has intervals, or of all if there is none.

    What a lane does before its first interval and after its last one (a batch that is being generated) is
    unknown, and must not count as idle.
    """
    lanes = _lanes(intervals)
    # the latest first start, and the earliest last end
    start = max(min(interval.start for interval in lane) for lane in lanes.values())
    end = min(max(interval.end for interval in lane) for lane in lanes.values())
    if end <= start:
        start = min(interval.start for interval in intervals)
        end = max(interval.end for interval in intervals)
    return start, end


def busy_seconds(intervals: Iterable[Interval], start: float, end: float) -> float:
    """Return the seconds between ``start`` and ``end`` that are in an interval, and in none that waits.

    Phases may lie in one another.
    """
    changes = []  # (time, change of the intervals around it: working, waiting)
    for interval in intervals:
        change = (0, 1) if interval.is_waiting else (1, 0)
        begin, finish = (min(max(time, start), end) for time in interval[2:4])
        changes += [(begin, change), (finish, (-change[0], -change[1]))]
    seconds, working, waiting, last = 0.0, 0, 0, start
    # a sweep over starts and ends: phases are nested, and each second counts once
    for time, (work, wait) in sorted(changes):
        if working and not waiting:
            seconds += time - last
        working, waiting, last = working + work, waiting + wait, time
    return seconds


def idle_shares(intervals: Sequence[Interval]) -> dict[str, float]:
    """Return for each lane the share of the ``window`` in which it was not busy."""
    start, end = window(intervals)
    return {
        lane: 1 - busy_seconds(own, start, end) / (end - start) if end > start else 0.0
        for lane, own in _lanes(intervals).items()
    }


def draw_timeline(intervals: Sequence[Interval], path: Path) -> Path:
    """Draw ``intervals`` into the PNG file ``path`` and return it; DataError if there are none."""
    if not intervals:
        raise DataError(f"{path}: there are no intervals to draw")
    return save_figure(timeline_figure(intervals), path)


def timeline_figure(intervals: Sequence[Interval]) -> Figure:
    """Return the picture: a row for each lane, with bars in the colour of their phase."""
    start, end = window(intervals)
    lanes = _lanes(intervals)
    figure = agg_figure(_WIDTH_INCHES, _LANE_INCHES * len(lanes) + 1.6)
    ax = figure.subplots()
    kinds = {}
    for row, own in enumerate(lanes.values()):
        kinds |= _draw_lane(ax, row, own, start, end)
    numbers = [interval.iteration for interval in intervals]
    shares = ", ".join(f"{lane} {share:.0%}" for lane, share in idle_shares(intervals).items())
    at = f"{datetime.fromtimestamp(start):%Y-%m-%d %H:%M:%S}"
    plain_axes(ax, f"Iterations {min(numbers)} to {max(numbers)}, {end - start:,.1f} s. Idle: {shares}", "")
    ax.set_xlabel(f"seconds from {at}")
    ax.set_xlim(0, max(end - start, 1e-6))
    ax.set_yticks(range(len(lanes)), list(lanes))
    ax.set_ylim(len(lanes) - 0.45, -0.5)
    ax.grid(visible=False, axis="y")
    shown = [kind for kind in (*_COLOUR_OF, _WAITING) if kind in kinds]
    bars = [kinds[kind] for kind in shown]
    figure.legend(bars, shown, loc="outside lower center", ncols=len(shown), frameon=False, fontsize=9)
    return figure


def _draw_lane(ax: Axes, row: int, intervals: Sequence[Interval], start: float, end: float) -> dict[str, Any]:
    """Draw the bars of one lane; return one of each kind, for the legend."""
    kinds: dict[str, Any] = {}
    seconds_per_inch = (end - start) / (_WIDTH_INCHES - 1)
    for interval in sorted(intervals, key=lambda one: -one.seconds):  # long ones below
        kind = _WAITING if interval.is_waiting else _KIND_OF.get(interval.name, "other")
        look: dict[str, Any] = {"color": _COLOUR_OF.get(kind), "ec": "white", "lw": 0.4}
        if kind == _WAITING:
            look = {"color": "#ececec", "ec": "#bdbdbd", "lw": 0, "hatch": "////"}
        (bar,) = ax.barh(row, interval.seconds, left=interval.start - start, height=0.6, **look)
        kinds.setdefault(kind, bar)
        if interval.version is not None and start <= interval.start <= end:
            ax.plot(interval.start - start, row + 0.36, marker="^", ms=3.5, color="#444444", clip_on=False)
            ax.annotate(
                f"v{interval.version}", (interval.start - start, row + 0.36), (3, -4),
                textcoords="offset points", fontsize=7, color="#444444", va="center",
            )  # fmt: skip
    labels = _batch_labels(intervals, start, end)
    fit = all(
        width > _LETTER_INCHES * (len(str(number)) + 1) * seconds_per_inch for number, _, width in labels
    )
    style: dict[str, Any] = {"color": "white", "weight": "bold"} if fit else {"color": "black"}
    for number, middle, _ in labels:  # in the bars, or above them if one is too narrow
        height = row if fit else row - 0.39
        ax.text(middle - start, height, str(number), ha="center", va="center", fontsize=8, **style)
    return kinds


def _batch_labels(intervals: Iterable[Interval], start: float, end: float) -> list[tuple[int, float, float]]:
    """Return number, middle and width of each batch's longest phase, unless most of it is out of sight."""
    longest: dict[int, Interval] = {}
    for interval in intervals:
        known = longest.get(interval.iteration)
        if not interval.is_waiting and (known is None or interval.seconds > known.seconds):
            longest[interval.iteration] = interval
    labels = []
    for number, interval in longest.items():
        left, right = max(interval.start, start), min(interval.end, end)
        if right - left > interval.seconds / 2:
            labels.append((number, (left + right) / 2, right - left))
    return labels


def _lanes(intervals: Iterable[Interval]) -> dict[str, list[Interval]]:
    """Return the intervals by lane, the lane that begins first on top."""
    lanes: dict[str, list[Interval]] = {}
    for interval in sorted(intervals, key=lambda one: one.start):
        lanes.setdefault(interval.lane, []).append(interval)
    return lanes
