"""One progress bar for everything slow in this package: on stderr, and only on a terminal."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn


class Bar:
    """A task of a rich progress display; ``advance`` moves it."""

    def __init__(self, display: Progress, description: str, total: int) -> None:
        self._display = display
        self._task = display.add_task(description, total=total)

    @property
    def is_visible(self) -> bool:
        """Whether anybody sees it."""
        return not self._display.disable

    def advance(self, amount: int = 1) -> None:
        """Count ``amount`` more units as done."""
        self._display.advance(self._task, amount)


@contextmanager
def progress_bar(description: str, total: int, *, show: bool = True) -> Generator[Bar]:
    """Yield a :class:`Bar` that disappears when the work is done; silent when stderr is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    hidden = not (show and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=hidden) as display:
        yield Bar(display, description, total)
