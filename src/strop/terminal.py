"""Text for terminals, logs and tables: control characters of users and models never reach the terminal."""

from __future__ import annotations

import itertools
import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.text import Text

if TYPE_CHECKING:
    from rich.table import Table

_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    """Escape control characters and lone surrogates, so that a text cannot control the terminal."""
    return _CONTROL_CHARACTERS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def is_terminal(stream: Any) -> bool:
    """Return True for a terminal; a program's own stream may have no ``isatty``, and some have no stream."""
    return bool(getattr(stream, "isatty", lambda: False)())


def literal(text: object, style: str = "") -> Text:
    """Return a text for rich that is shown as it is: brackets are no markup, control characters escaped."""
    return Text(printable(str(text)), style=style)


def table(
    title: object,
    headings: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    align: str = "",
    **options: Any,
) -> Table:
    """Return a table in the style of all commands, with title and cells shown as ``literal`` shows them.

    ``align``: "l" or "r" for each column, a text to the left or a number to the right; without it the first
    column is a text. A cell may be a ``rich.text.Text``. ``options`` are those of ``rich.table.Table``.
    """
    from rich import box
    from rich.table import Table

    found = Table(
        title=literal(title) if title else None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        **options,
    )
    for heading, letter in itertools.zip_longest(headings, align or "l", fillvalue="r"):
        found.add_column(heading, justify="left" if letter == "l" else "right", overflow="fold")
    for row in rows:
        found.add_row(*(cell if isinstance(cell, Text) else literal(cell) for cell in row))
    return found


class PrintableFormatter(logging.Formatter):
    """Formats records as usual, tracebacks included, then by ``words``, and escapes control characters."""

    def __init__(self, layout: str, words: Callable[[str], str] = str) -> None:
        super().__init__(layout)
        self._words = words

    def format(self, record: logging.LogRecord) -> str:
        return printable(self._words(super().format(record)))


def print_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception that nothing handled, as ``sys.excepthook`` does, with its message escaped."""
    sys.stderr.write(printable("".join(traceback.format_exception(kind, error, trace))))
