"""The end of every command: an error in one message, and an exit status."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Callable

from strop.errors import (
    SeveralErrors,
    StropError,
    is_interrupt,
    problems_of,
    signals_interrupt,
    write_failure,
)
from strop.terminal import printable

_NO_MEMORY = re.compile("MemoryError|OutOfMemoryError|can't allocate memory|out of memory")
"""Errors of Python, numpy, CUDA and torch on a CPU, whose class is a plain RuntimeError."""


def run_command(action: Callable[[], int], *, debug: bool) -> int:
    """Run ``action`` and return the exit status.

    A ``StropError``, and an ``OSError`` about a file or a full disk, is printed without its traceback
    (unless ``debug``) and gives 2; Ctrl-C gives 130, SIGTERM 143 and SIGHUP 129, as shells expect. Their
    message ends with the notes of the interrupt (``BaseException.add_note``), that of an error likewise.
    """
    received: list[int] = []
    try:
        with signals_interrupt(received):
            return action()
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            raise
        if received or isinstance(error, KeyboardInterrupt):
            return _stopped(received, error)
        return _failed(error)


def _stopped(received: list[int], error: BaseException) -> int:
    """Report an interrupt, also one that came out as the error of something that it interrupted."""
    number = received[0] if received else signal.SIGINT
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    notes = getattr(error, "__notes__", [])
    with contextlib.suppress(OSError):  # after SIGHUP the terminal is gone
        sys.stderr.write(printable(f"{name}: {'; '.join(notes)}" if notes else f"stopped by {name}") + "\n")
        if not is_interrupt(error):
            sys.stderr.write(printable(f"while stopping: {type(error).__name__}: {error}") + "\n")
        sys.stderr.flush()
    return 128 + number


def _failed(error: Exception) -> int:
    """Report an error that has a message for the user; raise any other."""
    message = write_failure(error) if isinstance(error, OSError) else str(error)
    text = f"{type(error).__name__}: {message}"
    if isinstance(error, StropError):
        errors = error.errors if isinstance(error, SeveralErrors) else [error]
        lines = [f"{type(one).__name__}: {problem}" for one in errors for problem in problems_of(one)]
    elif isinstance(error, OSError) and (error.filename is not None or "the disk is full" in message):
        lines = [text]
    elif isinstance(error, MemoryError | RuntimeError) and _NO_MEMORY.search(text):
        lines = [
            f"out of memory: {next(iter(message.splitlines()), '')}",
            "Lower batch sizes or lengths: strop check forecasts the memory of a run, and --debug shows "
            "where it ended",
        ]
    else:
        raise error  # a broken pipe or a child process, too: another path would not help
    lines += getattr(error, "__notes__", [])
    sys.stderr.writelines(printable(line) + "\n" for line in lines)
    return 2
