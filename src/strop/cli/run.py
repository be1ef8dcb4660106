"""The end of every command: an error in one message, and an exit status."""

from __future__ import annotations

import errno
import re
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NoReturn

from strop.errors import SeveralErrors, StropError, problems_of
from strop.terminal import printable

_NO_MEMORY = re.compile("MemoryError|OutOfMemoryError|can't allocate memory|out of memory")
"""Errors of Python, numpy, CUDA and torch on a CPU, whose class is a plain RuntimeError."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


def run_command(action: Callable[[], int], *, debug: bool) -> int:
    """Run ``action`` and return the exit status.

    A ``StropError``, and an ``OSError`` about a file or a full disk, is printed without its traceback
    (unless ``debug``) and gives 2; Ctrl-C gives 130 and SIGTERM 143, as shells expect. Their message ends
    with the notes of the interrupt (``BaseException.add_note``).
    """
    terminated: list[int] = []
    try:
        with _sigterm_interrupts(terminated):
            return action()
    except StropError as error:
        if debug:
            raise
        for one in error.errors if isinstance(error, SeveralErrors) else [error]:
            for problem in problems_of(one):
                sys.stderr.write(printable(f"{type(one).__name__}: {problem}") + "\n")
        return 2
    except OSError as error:
        if debug or (error.filename is None and error.errno not in _FULL):
            raise  # a broken pipe, a child process: another path would not help
        sys.stderr.write(printable(f"{type(error).__name__}: {error}") + "\n")
        return 2
    except (MemoryError, RuntimeError) as error:
        if debug or not _NO_MEMORY.search(f"{type(error).__name__}: {error}"):
            raise
        sys.stderr.write(
            f"out of memory: {printable(next(iter(str(error).splitlines()), ''))}\nLower batch sizes or "
            "lengths: strop check forecasts the memory of a run, and --debug shows where it ended\n"
        )
        return 2
    except KeyboardInterrupt as interrupt:
        if debug:
            raise
        name, status = ("SIGTERM", 143) if terminated else ("Ctrl-C", 130)
        notes = getattr(interrupt, "__notes__", [])
        sys.stderr.write("; ".join([f"stopped by {name}", *notes]) + "\n")
        return status


@contextmanager
def _sigterm_interrupts(received: list[int]) -> Generator[None]:
    """Turn SIGTERM, which schedulers and ``kill`` send, into a KeyboardInterrupt, and record it.

    Only in the main thread. The exception itself carries no mark: Ray replaces it by a new one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: Any) -> NoReturn:
        received.append(number)
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
