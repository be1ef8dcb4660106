"""What a scoring process prints goes to ``sys.stderr``, within bounds; its end is kept for error texts."""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import sys
import threading
from typing import IO

_CHUNK = 1 << 16
_PIPE_BYTES = 1 << 20  # more than a pipe holds
_TAIL_CHARACTERS = 2000
_ALLOWANCE_CHARACTERS = 16_000


class OutputReader:
    """Empties a pipe in a thread: a scorer that prints without end neither stops nor floods the terminal.

    Going through ``sys.stderr`` keeps a live progress display whole. ``allow_more`` starts a new sample,
    which may print 16,000 characters; the rest is dropped, and a line says so.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        os.set_blocking(pipe.fileno(), False)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._reading = threading.Lock()
        self._tail = ""
        self._allowance = _ALLOWANCE_CHARACTERS
        self._thread = threading.Thread(target=self._run, name="strop-reward-output", daemon=True)
        self._thread.start()

    def allow_more(self) -> None:
        """A new sample begins: of one that printed too much, what still lies in the pipe is dropped too."""
        with self._reading:
            if self._allowance <= 0 and not self._pipe.closed:
                self._read(_PIPE_BYTES)
            self._allowance = _ALLOWANCE_CHARACTERS

    def tail(self, wait_s: float = 1.0) -> str:
        """The last characters that were printed, once the process has ended (or after ``wait_s``)."""
        self._thread.join(wait_s)
        return self._tail.strip()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        is_open = True
        while is_open:
            poll.poll()
            with self._reading:
                is_open = self._read(_CHUNK)
        with self._reading:
            self._pipe.close()

    def _read(self, limit: int) -> bool:
        """Take at most ``limit`` bytes of what is there; False when the other end is closed."""
        while limit > 0:
            try:
                chunk = os.read(self._pipe.fileno(), min(limit, _CHUNK))
            except BlockingIOError:
                return True
            if not chunk:
                return False
            limit -= len(chunk)
            text = self._decoder.decode(chunk)
            self._tail = (self._tail + text)[-_TAIL_CHARACTERS:]
            self._pass_on(text)
        return True

    def _pass_on(self, text: str) -> None:
        if self._allowance <= 0:
            return
        passed = text[: self._allowance]
        self._allowance -= len(text)
        if self._allowance <= 0:
            passed += "\n[the reward function prints too much; the rest of this sample is not shown]\n"
        # The terminal may be gone, and this thread outlives most of the interpreter at its end.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(passed)
            sys.stderr.flush()
