"""The run on the terminal: a live table with a progress bar, or plain lines where there is no terminal.

Plain lines come at most every two seconds, so that a log file of a fast run stays readable; the first
step, the last step and every step with a validation score are always written. The live display stays at
the bottom of the terminal: what other modules print or log meanwhile appears above it. ``TERM=dumb``
gives plain lines on a terminal too, for debuggers.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from threading import Lock
from typing import TYPE_CHECKING, TextIO, cast

from strop.tracking.report import report_table, shown_table
from strop.tracking.text import (
    ACCURACY,
    HEADLINES,
    KL,
    LENGTH,
    LOSS,
    REWARD,
    SUPERVISED_HEADLINES,
    THROUGHPUT,
    UPDATE_KL,
    VAL_ACCURACY,
    VAL_LOSS,
    format_duration,
    format_number,
    sparkline,
    validation_scores,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from strop.tracking.base import RunInfo
    from strop.tracking.report import ValidationReport

PLAIN_LINE_EVERY_S = 2.0
STEPS_FOR_ETA = 50
LIVE_REFRESHES_PER_S = 2
PLAIN_WIDTH = 120


class ConsoleTracker:
    """Shows the main figures of each step on standard output."""

    def __init__(self, run: RunInfo) -> None:
        on_terminal = sys.stdout.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")
        self._display: LiveTable | PlainLines = LiveTable(run) if on_terminal else PlainLines(run)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show ``step``."""
        self._display.log(step, metrics)

    def log_validation(self, step: int, report: ValidationReport) -> None:
        """Show what a validation found as tables, above what is redrawn."""
        self._display.show(report_table(report, title=f"Validation at step {step}"))
        if report.shown:
            self._display.show(shown_table(report.shown, title=f"Samples of the validation at step {step}"))

    def close(self) -> None:
        """Leave the last state on the screen."""
        self._display.close()


def plain_console() -> Console:
    """Standard output, for tables: a file or a pipe has no width of its own."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)


class Pace:
    """How fast the steps go, over the last ``STEPS_FOR_ETA`` of them."""

    def __init__(self, run: RunInfo, clock: Callable[[], float]) -> None:
        self._total_steps = run.total_steps
        self._clock = clock
        self.step = run.start_step
        self._started = clock()
        self._reached: deque[tuple[int, float]] = deque([(run.start_step, self._started)], STEPS_FOR_ETA + 1)

    def reach(self, step: int) -> None:
        """``step`` is done; the same step again (a validation before training) only moves its time."""
        if self._reached[-1][0] == step:
            self._reached.pop()
        self._reached.append((step, self._clock()))
        self.step = step

    @property
    def elapsed_s(self) -> float:
        """Since the run was started or resumed."""
        return self._clock() - self._started

    @property
    def remaining_s(self) -> float | None:
        """Expected time to the last step; None before the first step."""
        (first_step, first_time), (last_step, last_time) = self._reached[0], self._reached[-1]
        if last_step == first_step:
            return None
        expected = (self._total_steps - last_step) * (last_time - first_time) / (last_step - first_step)
        return max(expected - (self._clock() - last_time), 0.0)


class PlainLines:
    """``step 12/400  reward 0.53  kl 0.002  len 6.1  tok/s 2,004  eta 1m20s``."""

    def __init__(self, run: RunInfo, clock: Callable[[], float] = time.monotonic) -> None:
        self._total_steps = run.total_steps
        self._clock = clock
        self._pace = Pace(run, clock)
        self._last_written: float | None = None
        self._held_back: str | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a line, or hold it back when the last one is too recent."""
        self._pace.reach(step)
        scores = validation_scores(metrics)
        now = self._clock()
        self._held_back = self._line(step, metrics, scores)
        too_soon = self._last_written is not None and now - self._last_written < PLAIN_LINE_EVERY_S
        if scores or step >= self._total_steps or not too_soon:
            self._last_written = now
            self._write_held_back()

    def show(self, what: RenderableType) -> None:
        """Write something else."""
        plain_console().print(what)

    def close(self) -> None:
        """Write the line of the last step when it was held back: a run may end early."""
        self._write_held_back()

    def _write_held_back(self) -> None:
        if self._held_back is not None:
            print(self._held_back, flush=True)
            self._held_back = None

    def _line(self, step: int, metrics: Mapping[str, float], scores: Mapping[str, float]) -> str:
        kl = KL.pick(metrics)
        figures = {
            "reward": REWARD.pick(metrics),
            "kl": UPDATE_KL.pick(metrics) if kl is None else kl,
            "len": LENGTH.pick(metrics),
            "loss": LOSS.pick(metrics),
            "accuracy": ACCURACY.pick(metrics),
            "val loss": VAL_LOSS.pick(metrics),
            "val accuracy": VAL_ACCURACY.pick(metrics),
            "tok/s": THROUGHPUT.pick(metrics),
            **{f"val {source}": score for source, score in scores.items()},
        }
        parts = [f"{label} {format_number(value)}" for label, value in figures.items() if value is not None]
        left = self._pace.remaining_s
        eta = [f"eta {format_duration(left)}"] if step < self._total_steps and left is not None else []
        return "  ".join([f"step {step}/{self._total_steps}", *parts, *eta])


class LiveTable:
    """A table that is redrawn in place: each figure now, at the first step, and its course so far."""

    def __init__(self, run: RunInfo) -> None:
        from rich.console import Console
        from rich.live import Live

        self._title = f"{run.project_name} / {run.experiment_name}"
        self._total_steps = run.total_steps
        self._pace = Pace(run, time.monotonic)
        self._history: dict[str, list[float]] = {}
        self._validation: dict[str, list[float]] = {}
        self._lock = Lock()  # the display is drawn by a thread of its own
        streams = (sys.stdout, sys.stderr)
        self._live = Live(
            console=Console(), get_renderable=self._render, refresh_per_second=LIVE_REFRESHES_PER_S
        )
        self._live.start()
        self._moved_handlers = _move_log_handlers(*streams)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in the figures of ``step``; they appear at the next refresh."""
        with self._lock:
            self._pace.reach(step)
            for headline in (*SUPERVISED_HEADLINES, *HEADLINES):
                if (value := headline.pick(metrics)) is not None:
                    self._history.setdefault(headline.label, []).append(value)
            for source, score in validation_scores(metrics).items():
                self._validation.setdefault(source, []).append(score)

    def show(self, what: RenderableType) -> None:
        """Write something above the display."""
        self._live.console.print(what)

    def close(self) -> None:
        """Draw the last state and give the terminal back."""
        for handler, stream in self._moved_handlers:
            handler.setStream(stream)
        self._moved_handlers = []
        self._live.stop()

    def _render(self) -> RenderableType:
        from rich import box
        from rich.console import Group
        from rich.table import Table

        with self._lock:
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            table.add_column("")
            table.add_column("now", justify="right", style="bold")
            table.add_column("first", justify="right", style="dim")
            table.add_column("course", style="cyan", no_wrap=True)
            for label, values in self._history.items():
                table.add_row(label, *_course(values))
            for source, values in self._validation.items():
                table.add_row(f"validation {source}", *_course(values), style="green")
            bar = self._progress_bar()
            return Group(bar, table) if table.row_count else bar

    def _progress_bar(self) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            Text(self._title, style="bold"),
            ProgressBar(total=max(self._total_steps, 1), completed=self._pace.step, width=30),
            f"step {self._pace.step}/{self._total_steps}",
            f"elapsed {format_duration(self._pace.elapsed_s)}",
            f"left {format_duration(self._pace.remaining_s)}",
        )
        return bar


def _course(values: list[float]) -> tuple[str, str, str]:
    return format_number(values[-1]), format_number(values[0]), sparkline(values)


def _move_log_handlers(stdout: TextIO, stderr: TextIO) -> list[tuple[logging.StreamHandler, TextIO]]:
    """Point log handlers at the redirected streams; returns (handler, the stream it had).

    While the display is live ``sys.stdout`` and ``sys.stderr`` write above it, but a handler made earlier
    keeps the stream it was given and would write across the table.
    """
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    moved: list[tuple[logging.StreamHandler, TextIO]] = []
    for logger in loggers:
        for handler in logger.handlers if isinstance(logger, logging.Logger) else ():
            if not isinstance(handler, logging.StreamHandler) or handler.stream not in (stdout, stderr):
                continue
            redirected = sys.stdout if handler.stream is stdout else sys.stderr
            moved.append((handler, cast("TextIO", handler.setStream(redirected))))
    return [pair for pair in moved if pair[1] is not None]
