"""What a scoring process prints goes to ``sys.stderr``, within bounds; its end is kept for error texts."""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
import threading
from typing import IO

_CHUNK = 1 << 16
_TAIL_CHARACTERS = 2000
_ALLOWANCE_CHARACTERS = 16_000


class OutputReader:
    """Empties a pipe in a thread: a scorer that prints without end neither stops nor floods the terminal.

    Going through ``sys.stderr`` keeps a live progress display whole. ``allow_more`` starts a new sample,
    which may print 16,000 characters; the rest is dropped, and a line says so.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._tail = ""
        self._allowance = _ALLOWANCE_CHARACTERS
        self._thread = threading.Thread(target=self._run, name="strop-reward-output", daemon=True)
        self._thread.start()

    def allow_more(self) -> None:
        """A new sample begins."""
        self._allowance = _ALLOWANCE_CHARACTERS

    def tail(self, wait_s: float = 1.0) -> str:
        """The last characters that were printed, once the process has ended (or after ``wait_s``)."""
        self._thread.join(wait_s)
        return self._tail.strip()

    def _run(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        with self._pipe:
            while chunk := os.read(self._pipe.fileno(), _CHUNK):
                text = decoder.decode(chunk)
                self._tail = (self._tail + text)[-_TAIL_CHARACTERS:]
                self._pass_on(text)

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
