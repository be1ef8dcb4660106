"""Style of the pictures of a run.

They are drawn with matplotlib's Figure objects and the Agg renderer: no display is needed, and pyplot's
global state, which a notebook or a user's reward function may use, stays untouched.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from strop.files import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can distinguish.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def agg_figure(width: float, height: float) -> Figure:
    """Return a figure, in inches, that draws without a display and without pyplot's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path) -> Path:
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=130)
    return path


def plain_axes(ax: Axes, title: str, unit: str) -> None:
    """Set title and unit, and the style that all graphs share."""
    ax.set_title(title, fontsize=11, loc="left")
    ax.set_ylabel(unit)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25, lw=0.6)
    ax.tick_params(labelsize=9)
