"""The run on the terminal: a live table with a progress bar, or one line per step where there is no terminal.

The live display stays at the bottom of the terminal; whatever other modules print or log appears above it.
``TERM=dumb`` gives plain lines on a terminal too, for debuggers.
"""

from __future__ import annotations

import importlib
import io
import logging
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from threading import Lock
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from strop.terminal import is_terminal, literal, printable, table
from strop.tracking.base import RunInfo
from strop.tracking.lengths import ColumnLengths, lengths_table
from strop.tracking.report import ValidationReport, report_table, shown_table
from strop.tracking.text import format_number, headlines, sparkline, validation_scores

REFRESHES_PER_S = 2
PLAIN_WIDTH = 120
SPEED_OVER_S = 3600.0
"""The time left is estimated from the steps of the last hour, at most 1,000 of them."""


def console_tracker(run: RunInfo) -> FigureTable | PlainLines:
    """Return the tracker that shows the main figures of each step on standard output."""
    if in_notebook():
        return NotebookTable(run)
    on_terminal = is_terminal(sys.stdout) and os.environ.get("TERM", "") not in ("dumb", "unknown")
    return LiveTable(run) if on_terminal else PlainLines(run)


def in_notebook() -> bool:
    """Return True if this program is the kernel of a notebook."""
    return Console().is_jupyter


def plain_console() -> Console:
    """Return a console on standard output, with a fixed width for a file or a pipe."""
    return Console(width=None if is_terminal(sys.stdout) else PLAIN_WIDTH)


def step_progress(run: RunInfo) -> Progress:
    """Return a progress bar over the steps of ``run``, as its one task."""
    progress = Progress(
        TextColumn("{task.description}", style="bold", markup=False),
        BarColumn(bar_width=30),
        TextColumn("step {task.completed:.0f}/{task.total:.0f}  elapsed"),
        TimeElapsedColumn(),
        TextColumn(" left"),
        TimeRemainingColumn(),
        auto_refresh=False,  # the live display draws it
        speed_estimate_period=SPEED_OVER_S,
    )
    title = printable(f"{run.project_name} / {run.experiment_name}")
    progress.add_task(title, total=max(run.total_steps, 1), completed=run.start_step)
    return progress


class Tables:
    """Print tables on standard output, or where ``console`` is."""

    @property
    def console(self) -> Console:
        return plain_console()

    def log_validation(self, step: int, report: ValidationReport) -> None:
        self.console.print(_validation(step, report))

    def log_lengths(self, columns: Sequence[ColumnLengths]) -> None:
        self.console.print(lengths_table(columns))


class Occasionally:
    """Write a line to ``stream`` after a silence of 10 s, then of 20 s, and so on, up to 10 minutes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._written, self._silence = stream, time.monotonic(), 10.0

    def show(self, line: str) -> None:
        """Write ``line`` if it is time to."""
        if line and time.monotonic() - self._written >= self._silence:
            self._silence = min(2 * self._silence, 600.0)
            self.write(line)

    def write(self, line: str) -> None:
        """Write ``line`` at once."""
        self._written = time.monotonic()
        # flush: a file or pipe would get lines in blocks of 8 KiB
        print(printable(line), file=self._stream, flush=True)


class PlainLines(Tables):
    """``step 12/400  reward 0.53  kl 0.002  len 6.1  tok/s 2,004  eta 0:01:20``."""

    def __init__(self, run: RunInfo) -> None:
        self._total_steps = run.total_steps
        self._progress = step_progress(run)
        self._lines = Occasionally(sys.stdout)
        self.log_progress = self._lines.show

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        figures = {line.short: metrics[line.metric] for line in headlines([metrics]) if line.short}
        figures |= {f"val {source}": score for source, score in validation_scores(metrics).items()}
        parts = [f"{label} {format_number(value)}" for label, value in figures.items()]
        task = self._progress.tasks[0]
        self._progress.update(task.id, completed=step)
        left = task.time_remaining
        eta = []
        if step < self._total_steps and left is not None:
            eta = [f"eta {timedelta(seconds=round(left))}"]
        self._lines.write("  ".join([f"step {step}/{self._total_steps}", *parts, *eta]))

    def close(self) -> None:
        """Do nothing: every line is already written."""


@contextmanager
def status_line() -> Generator[Callable[[str], None]]:
    """Yield a function that shows a line on standard error until the body ends, or writes it now and then."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("") as status:
            yield lambda line: status.update(literal(line))
    else:
        yield Occasionally(sys.stderr).show


class FigureTable(Tables):
    """The last and first value of each figure, with a sparkline, below a progress bar."""

    def __init__(self, run: RunInfo) -> None:
        self._progress = step_progress(run)
        self._history: defaultdict[str, list[float]] = defaultdict(list)
        self._lock = Lock()  # rich draws in a thread
        self._doing = ""

    def log_progress(self, line: str) -> None:
        """Show ``line`` below the bar at the next refresh."""
        self._doing = line

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the figures of ``step``; they appear at the next refresh."""
        with self._lock:
            self._progress.update(self._progress.tasks[0].id, completed=step)
            for headline in headlines([metrics]):
                self._history[headline.label].append(metrics[headline.metric])
            for source, score in validation_scores(metrics).items():
                self._history[f"validation {source}"].append(score)

    def render(self) -> RenderableType:
        """Return the current state."""
        with self._lock:
            rows = [
                (
                    literal(label, style := "green" if label.startswith("validation") else ""),
                    literal(format_number(values[-1]), f"bold {style}"),
                    literal(format_number(values[0]), f"dim {style}"),
                    literal(sparkline(values), style or "cyan"),
                )
                for label, values in self._history.items()
            ]
            doing = [literal(self._doing)] if self._doing else []
            figures = [table("", ["", "now", "first", "course"], rows, align="lrrl")] if rows else []
            return Group(self._progress.get_renderable(), *doing, *figures)


class LiveTable(FigureTable):
    """The table on a terminal, redrawn in place."""

    def __init__(self, run: RunInfo) -> None:
        super().__init__(run)
        streams = (sys.stdout, sys.stderr)
        self._live = Live(console=Console(), get_renderable=self.render, refresh_per_second=REFRESHES_PER_S)
        self._live.start()
        self._moved_handlers = _move_log_handlers(*streams)

    @property
    def console(self) -> Console:
        """The live display's, which prints above it."""
        return self._live.console

    def close(self) -> None:
        """Draw the last state and give the terminal back."""
        for handler, stream in self._moved_handlers:
            handler.setStream(stream)
        self._moved_handlers = []
        self._live.stop()


class NotebookTable(FigureTable):
    """The table in the output of a notebook's cell, replaced in place.

    rich's own live display needs ipywidgets there, and shows nothing in a notebook that is opened later.
    """

    def __init__(self, run: RunInfo) -> None:
        super().__init__(run)
        self._handle: Any = None
        self._drawn = 0.0
        self._draw()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the figures of ``step``, and show them unless the last change was a moment ago."""
        super().log(step, metrics)
        if time.monotonic() - self._drawn > 1 / REFRESHES_PER_S:
            self._draw()

    def log_progress(self, line: str) -> None:
        """Show ``line`` unless the last change was a moment ago."""
        super().log_progress(line)
        if time.monotonic() - self._drawn > 2.0:
            self._draw()

    def close(self) -> None:
        """Show the last state."""
        self._draw()

    def _draw(self) -> None:
        display = importlib.import_module("IPython.display").display  # a kernel has it
        console = Console(file=io.StringIO(), record=True, width=PLAIN_WIDTH, force_jupyter=False)
        console.print(self.render())
        html = console.export_html(inline_styles=True, code_format=_NOTEBOOK_HTML, clear=False)
        content = {"text/html": html, "text/plain": console.export_text()}
        if self._handle is None:
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)
        self._drawn = time.monotonic()


_NOTEBOOK_HTML = '<pre style="line-height:normal;font-family:monospace">{code}</pre>'


def _validation(step: int, report: ValidationReport) -> Group:
    tables = [report_table(report, title=f"Validation at step {step}")] if report.sources else []
    if report.shown:
        what = "Samples" if report.sources else "Pairs"
        tables.append(shown_table(report.shown, title=f"{what} of the validation at step {step}"))
    return Group(*tables)


def _move_log_handlers(stdout: TextIO, stderr: TextIO) -> list[tuple[logging.StreamHandler, TextIO]]:
    """Point log handlers at the redirected streams; return (handler, the stream it had) pairs.

    While the display is live ``sys.stdout`` and ``sys.stderr`` write above it, but a handler made earlier
    keeps its original stream and would write across the table.
    """
    redirected = {stdout: sys.stdout, stderr: sys.stderr}
    moved: list[tuple[logging.StreamHandler, TextIO]] = []
    for logger in [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]:
        for handler in logger.handlers if isinstance(logger, logging.Logger) else ():
            if isinstance(handler, logging.StreamHandler) and handler.stream in redirected:
                moved.append((handler, handler.stream))
                handler.setStream(redirected[handler.stream])
    return moved
