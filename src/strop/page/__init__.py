"""The page of a run: served while the run writes (``server.py``), or written as one file (``one_file.py``).

``files.py`` reads a run folder. ``static/`` is the page itself: plain HTML, CSS and JavaScript without a
build step, and uPlot 1.6.32 (MIT, ``uPlot.LICENSE``) for the curves. Texts of users and models travel as JSON
and are shown as text nodes.
"""

from __future__ import annotations

from pathlib import Path

STATIC = Path(__file__).parent / "static"
STYLES = ("uPlot.min.css", "style.css")
SCRIPTS = (
    *("uPlot.iife.min.js", "dom.js", "source.js", "charts.js", "curves.js"),
    *("tokens.js", "samples.js", "detail.js", "run.js", "main.js"),
)
"""The page's files, in the order in which it loads them."""


def page_file(name: str) -> str:
    """Return the text of one of the page's files."""
    return (STATIC / name).read_text(encoding="utf-8")
