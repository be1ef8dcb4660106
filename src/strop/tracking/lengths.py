"""Token lengths of a run's data sets: a table for the console, and the histogram ``token_lengths.png``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from strop.terminal import table
from strop.tracking.figures import COLOURS, agg_figure, plain_axes, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LENGTHS_FILE = "token_lengths.png"
LENGTHS_NAME = "data/token_lengths"
"""Name under which trackers record the figure."""

BARS = 60
LOG_FROM = 4
"""The axis is logarithmic where limit and longest length differ by this factor or more."""


@dataclass(frozen=True)
class ColumnLengths:
    """Token lengths of one column of a data set, before rows are dropped or cut."""

    split: str
    """``train`` or ``val``."""
    column: str
    """``prompt``, ``response``, ``chosen`` or ``rejected``."""
    counts: np.ndarray
    """``counts[k]`` rows have k tokens, int64 [longest + 1]."""
    limit: int
    key: str
    """The configuration key of the limit."""
    dropped: int
    """Rows of the data set that are not used, for whichever of its columns."""
    of_pictures: tuple[int, int] | None = None
    """Least and most tokens of a row that stand for pictures; None for rows of text."""

    @property
    def rows(self) -> int:
        """Number of rows in the files."""
        return int(self.counts.sum())

    @property
    def longest(self) -> int:
        """Most tokens of a row."""
        return len(self.counts) - 1

    @property
    def for_pictures(self) -> str:
        """Tokens of pictures in words, as "64 to 1,296"; "" for rows of text."""
        return " to ".join(dict.fromkeys(f"{tokens:,}" for tokens in self.of_pictures or ()))

    @property
    def over(self) -> int:
        """Number of rows over the limit, which are dropped or cut."""
        return int(self.counts[self.limit + 1 :].sum())

    def quantile(self, share: float) -> int:
        """Return the least length that at least ``share`` of the rows do not exceed."""
        return int(np.searchsorted(self.counts.cumsum(), share * self.rows))


def lengths_table(columns: Sequence[ColumnLengths]) -> Table:
    """Return a table with a line per column."""
    headings = ("", "rows", "median", "95%", "longest", "limit", "over the limit", "rows dropped")
    rows = []
    for found in columns:
        figures = (
            *(found.rows, found.quantile(0.5), found.quantile(0.95), found.longest),
            *(found.limit, found.over, found.dropped),
        )
        rows.append((f"{found.split} {found.column}", *(f"{figure:,}" for figure in figures)))
        if found.of_pictures:
            rows.append(("  for pictures", "", "", "", found.for_pictures, "", "", ""))
    return table("Token lengths", headings, rows)


def draw_lengths(columns: Sequence[ColumnLengths], run_dir: Path) -> Path:
    """Draw ``token_lengths.png`` in the run folder; return its path."""
    return save_figure(lengths_figure(columns), run_dir / LENGTHS_FILE)


def lengths_figure(columns: Sequence[ColumnLengths]) -> Figure:
    """Return the histograms of all columns, one panel per limit."""
    panels: dict[str, list[ColumnLengths]] = {}
    for found in columns:
        panels.setdefault(found.key, []).append(found)
    figure = agg_figure(6.4 * len(panels), 4.0)
    for ax, (key, shown) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        _draw_panel(ax, key, shown)
    dropped = {found.split: f"{found.dropped:,} of {found.rows:,} {found.split} rows" for found in columns}
    title = f"Token lengths: dropped {', '.join(dropped.values())}"
    figure.suptitle(title, fontsize=11, fontweight="bold")
    return figure


def _draw_panel(ax: Axes, key: str, shown: list[ColumnLengths]) -> None:
    limit, longest = shown[0].limit, max(found.longest for found in shown)
    is_log = max(limit, longest) >= LOG_FROM * max(min(limit, longest), 1)
    edges = bin_edges(longest, is_log=is_log)
    names = list(dict.fromkeys(found.column for found in shown))
    splits = list(dict.fromkeys(found.split for found in shown))
    for found in shown:
        # A panel of one column shows splits by colour, one of several columns by the line's style.
        colour = COLOURS[(names.index(found.column) if len(names) > 1 else splits.index(found.split))]
        shares = binned(found.counts, edges) / max(found.rows, 1)
        over = (
            f", {found.over:,} ({found.over / max(found.rows, 1):.1%}) over the limit" if found.over else ""
        )
        is_first = found.split == splits[0]
        if is_first:
            ax.stairs(shares, edges, fill=True, color=colour, alpha=0.2)
        style = "-" if is_first else (0, (4, 2))
        label = f"{found.split} {found.column}: median {found.quantile(0.5):,}{over}"
        label += f"\nof these {found.for_pictures} for pictures" if found.of_pictures else ""
        ax.stairs(shares, edges, color=colour, lw=1.4, ls=style, label=label)
    ax.axvline(limit, color="black", lw=1.4, label=f"{key}={limit:,}")
    if is_log:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        shortest = min(int(np.flatnonzero(found.counts)[0]) for found in shown)
        ax.set_xlim(max(0.6 * min(shortest, limit), 0.5), 1.15 * max(limit, edges[-1]))
    else:
        ax.set_xlim(edges[0], 1.04 * max(limit, edges[-1]))
    plain_axes(ax, ", ".join(names), "share of rows")
    ax.set_xlabel("tokens, logarithmic" if is_log else "tokens")
    ax.set_ylim(0, ax.get_ylim()[1] * (1.15 + 0.07 * len(shown)))  # room for the legend
    ax.legend(fontsize=8, loc="upper left", edgecolor="none", framealpha=0.85)


def bin_edges(longest: int, *, is_log: bool) -> np.ndarray:
    """Return the edges of at most ``BARS`` bins of whole lengths up to ``longest``, at k - 0.5.

    Logarithmic bins begin at length 1, and the first holds rows without a token too.
    """
    if is_log:
        steps = np.geomspace(1, longest + 1, BARS + 1).round()
        # rounded steps repeat at the short end; edges at k - 0.5 put whole lengths inside bins
        return np.unique(np.append(steps, 2)) - 0.5
    width = max(math.ceil((longest + 1) / BARS), 1)
    return np.arange(0, longest + width + 1, width) - 0.5


def binned(counts: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return the rows in each bin; the first also has those below it."""
    totals = np.concatenate([[0], counts.cumsum()])
    ends = totals[np.minimum((edges + 0.5).astype(int), len(counts))]
    ends[0] = 0
    return np.diff(ends)
