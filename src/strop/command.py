"""How every command ends: what went wrong in one message, and an exit status."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NoReturn

from strop.errors import ConfigError, StropError


def run_command(action: Callable[[], int], *, debug: bool, makes_checkpoints: bool = True) -> int:
    """Run ``action`` and return the exit status.

    A ``StropError`` is printed without its traceback (unless ``debug``) and gives 2; Ctrl-C gives 130 and
    SIGTERM 143, as shells expect. What is left then is told of an action that ``makes_checkpoints``.
    """
    terminated: list[int] = []
    try:
        with _sigterm_interrupts(terminated):
            return action()
    except StropError as error:
        if debug:
            raise
        problems = error.problems if isinstance(error, ConfigError) else [str(error)]
        for problem in problems:
            sys.stderr.write(f"{type(error).__name__}: {problem}\n")
        return 2
    except KeyboardInterrupt:
        if debug:
            raise
        name, status = ("SIGTERM", 143) if terminated else ("Ctrl-C", 130)
        kept = "; the last whole checkpoint is kept" if makes_checkpoints else ""
        sys.stderr.write(f"stopped by {name}{kept}\n")
        return status


@contextmanager
def _sigterm_interrupts(received: list[int]) -> Generator[None]:
    """SIGTERM, which schedulers and ``kill`` send, unwinds the stack as Ctrl-C does, and is noted down.

    Only in the main thread. The exception cannot tell the two apart: Ray raises a new one.
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
