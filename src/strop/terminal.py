"""Text for terminals, logs and tables: control characters of users and models never reach the terminal."""

from __future__ import annotations

import logging
import re
import sys
import traceback
from types import TracebackType

from rich.text import Text

_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    """Escape control characters and lone surrogates, so that a text cannot control the terminal."""
    return _CONTROL_CHARACTERS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def literal(text: object, style: str = "") -> Text:
    """Return a text for rich that is shown as it is: brackets are no markup, control characters escaped."""
    return Text(printable(str(text)), style=style)


class PrintableFormatter(logging.Formatter):
    """Formats records as usual, tracebacks included, and escapes control characters."""

    def format(self, record: logging.LogRecord) -> str:
        """See ``logging.Formatter.format``."""
        return printable(super().format(record))


def print_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception that nothing handled, as ``sys.excepthook`` does, with its message escaped."""
    sys.stderr.write(printable("".join(traceback.format_exception(kind, error, trace))))
