"""The end of every command: an error in one message, and an exit status."""

from __future__ import annotations

import errno
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NoReturn

from strop.errors import SeveralErrors, StropError, is_interrupt, problems_of

_FULL = (errno.ENOSPC, errno.EDQUOT)


def run_command(action: Callable[[], int], *, debug: bool, makes_checkpoints: bool = True) -> int:
    """Run ``action`` and return the exit status.

    A ``StropError``, and an ``OSError`` about a file or a full disk, is printed without its traceback
    (unless ``debug``) and gives 2; Ctrl-C gives 130 and SIGTERM 143, as shells expect. ``makes_checkpoints``
    adds to that message that the last one is kept.
    """
    received: list[int] = []
    try:
        with _signals_interrupt(received):
            return action()
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            raise
        if received or isinstance(error, KeyboardInterrupt):
            return _stopped(received, error, makes_checkpoints=makes_checkpoints)
        return _failed(error)


def _stopped(received: list[int], error: BaseException, *, makes_checkpoints: bool) -> int:
    """Report an interrupt, also one that came out as the error of something that it interrupted."""
    name, status = ("SIGTERM", 143) if signal.SIGTERM in received else ("Ctrl-C", 130)
    kept = "; the last whole checkpoint is kept" if makes_checkpoints else ""
    sys.stderr.write(f"stopped by {name}{kept}\n")
    if not is_interrupt(error):
        sys.stderr.write(f"while stopping: {type(error).__name__}: {error}\n")
    return status


def _failed(error: Exception) -> int:
    """Report an error that has a message for the user; raise any other."""
    if isinstance(error, StropError):
        for one in error.errors if isinstance(error, SeveralErrors) else [error]:
            for problem in problems_of(one):
                sys.stderr.write(f"{type(one).__name__}: {problem}\n")
        return 2
    if not isinstance(error, OSError) or (error.filename is None and error.errno not in _FULL):
        raise error  # a broken pipe, a child process: another path would not help
    sys.stderr.write(f"{type(error).__name__}: {error}\n")
    return 2


@contextmanager
def _signals_interrupt(received: list[int]) -> Generator[None]:
    """Turn SIGTERM, which schedulers and ``kill`` send, into a KeyboardInterrupt as of Ctrl-C; record both.

    Only in the main thread. The exception itself carries no mark: Ray replaces it by a new one, and writers
    of files by their own errors. Ctrl-C stays ignored where it is, as in a background job.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> NoReturn:
        received.append(number)
        raise KeyboardInterrupt

    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        numbers.append(signal.SIGINT)
    previous = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
