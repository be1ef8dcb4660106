"""``Child``: a running scoring process with its pipes, its output, and its end."""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import subprocess
import sys
import threading
import time
import uuid
import weakref
from typing import IO, Any

from strop.rewards.process_tree import MARKER, describe_exit, hold_descendants, kill_held, kill_tree
from strop.rewards.worker import wire
from strop.terminal import printable

_CHUNK = 1 << 16
_PIPE_BYTES = 1 << 20  # more than a pipe holds
_TAIL_CHARACTERS = 2000
_ALLOWANCE_CHARACTERS = 16_000
_GOODBYE_S = 2.0


class OutputReader:
    """Copy a scoring process's output to ``sys.stderr`` in a thread, and keep its end for error texts.

    Each sample may print 16,000 characters; the rest is dropped with a note, so that endless output neither
    blocks the scorer nor floods the terminal. ``sys.stderr`` keeps a live display intact.
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
        """Start a new sample's allowance; drop what the last one left in the pipe beyond its own."""
        with self._reading:
            if self._allowance <= 0 and not self._pipe.closed:
                self._read(_PIPE_BYTES)
            self._allowance = _ALLOWANCE_CHARACTERS

    def tail(self, wait_s: float = 1.0) -> str:
        """Return the last printed characters, once the process has ended or ``wait_s`` have passed."""
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
        """Read at most ``limit`` available bytes; return False if the other end is closed."""
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
        # The terminal may be gone, and at exit this thread outlives most of the interpreter.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(printable(passed))
            sys.stderr.flush()


class Child:
    """A running process with its pipes."""

    def __init__(self, memory_limit_mb: int | None) -> None:
        self.memory_limit = ""  # for error texts
        if memory_limit_mb is not None:
            self.memory_limit = f"its memory is limited by reward_model.memory_limit_mb={memory_limit_mb}"
        marker = uuid.uuid4().hex
        lifeline, own_end = os.pipe()
        try:
            self.process = subprocess.Popen(
                # -P: a random.py in the current folder must not shadow the standard library's
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "strop.rewards.worker.child",
                    str(lifeline),
                    str(memory_limit_mb or 0),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(lifeline,),
                start_new_session=True,  # a separate group, which the terminal's Ctrl-C does not reach
                env=os.environ | {MARKER: marker},
            )
        except BaseException:
            os.close(own_end)
            raise
        finally:
            os.close(lifeline)
        # Also runs at garbage collection and at interpreter exit.
        self._end = weakref.finalize(self, _end_process, self.process, marker, own_end, os.getpid())
        pipes: list[Any] = [self.process.stdin, self.process.stdout, self.process.stderr]
        self._requests, answers, errors = pipes
        self.requests, self.answers = self._requests.fileno(), answers.fileno()
        os.set_blocking(self.requests, False)
        os.set_blocking(self.answers, False)
        self.output = OutputReader(errors)
        self.has_answered = False

    def is_alive(self) -> bool:
        """Return True if it runs; do not reap it, so that its process id stays reserved."""
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:  # SIGCHLD is ignored, so the kernel has reaped it
            return False

    def is_gone(self) -> bool:
        """Return True if it ended, or wrote without a request, between two samples."""
        return not wire.is_quiet(self.answers) or not self.is_alive()

    def say_goodbye(self) -> None:
        """Close its requests, give it a moment to exit, and kill what it started."""
        started = hold_descendants(self.process.pid)  # not identifiable once it is gone
        self._requests.close()
        deadline = time.monotonic() + _GOODBYE_S
        while self.is_alive() and time.monotonic() < deadline:
            time.sleep(0.005)
        kill_held(started)

    def kill(self) -> str:
        """Kill it and its descendants; return how it ended, with the end of its output."""
        status = self._end()
        ending = "it was killed" if status is None else describe_exit(status)
        if self.memory_limit:
            ending += f" ({self.memory_limit})"
        printed = self.output.tail()
        return f"{ending}; the last it printed:\n{printed}" if printed else ending


def _end_process(process: subprocess.Popen[bytes], marker: str, lifeline: int, owner: int) -> int | None:
    if os.getpid() != owner:  # garbage collection in a fork of the program, which must not kill it
        return None
    status = kill_tree(process, marker)
    os.close(lifeline)
    for pipe in (process.stdin, process.stdout):  # its output pipe belongs to the reader's thread
        if pipe is not None:
            pipe.close()
    return status
