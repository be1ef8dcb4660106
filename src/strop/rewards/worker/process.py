"""``Child``: a running scoring process with its pipes, its output, and its end.

Pickles go to it, and lines of JSON come back. Deadlines are values of ``time.monotonic()``.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from typing import IO, Any

from strop.errors import RewardError
from strop.process_tree import MARKER, describe_exit, hold_descendants, kill_held, kill_tree
from strop.rewards.scorer import Outcome
from strop.terminal import printable

_CHUNK = 1 << 16
_POLL_S = 0.2
_LONGEST_LINE = 1 << 20
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

    def tail(self) -> str:
        """Return the last printed characters, once the process has ended or a second has passed."""
        self._thread.join(1.0)
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
            passed += "\n[it prints too much; the rest of this sample is not shown]\n"
        # The terminal may be gone, and at exit this thread outlives most of the interpreter.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(printable(passed))
            sys.stderr.flush()


class Lane:
    """Requests to a process and its answers, with any number in flight.

    Messages that do not fit into the pipe wait here.
    """

    def __init__(self, requests: int, answers: int, longest_line: int = _LONGEST_LINE) -> None:
        self._requests, self._answers = requests, answers
        os.set_blocking(requests, False)
        os.set_blocking(answers, False)
        self._longest_line = longest_line
        self._unsent = bytearray()
        self._received = bytearray()
        self._poll = select.poll()
        self._poll.register(answers, select.POLLIN)

    def is_quiet(self) -> bool:
        """Return True if there is nothing behind the last answer, and the pipe is open at its other end."""
        return not self._received and self._answers not in dict(self._poll.poll(0))

    @property
    def is_idle(self) -> bool:
        """True if everything posted is in the pipe, so that there may be room for more."""
        return not self._unsent

    def post(self, message: bytes) -> None:
        """Queue a message for ``exchange`` to send."""
        if not self._unsent:
            self._poll.register(self._requests, select.POLLOUT)
        self._unsent += message

    def exchange(self, deadline: float, is_alive: Callable[[], bool]) -> bytes | None:
        """Send and receive until an answer is complete; return None once all posted messages are sent.

        Answers written before the deadline, or before the process ended, come before the error.

        Raises:
            TimeoutError: past the deadline. EOFError: the process is gone. A child of it may hold the pipe
            open, so ``is_alive`` is polled too. ValueError: a line too long for an answer.
        """
        while (end := self._received.find(b"\n")) < 0:
            remaining = deadline - time.monotonic()
            ready = dict(self._poll.poll(max(0.0, min(remaining, _POLL_S)) * 1000))
            if self._answers in ready:
                self._read()
            elif self._requests in ready:
                self._write()
                if not self._unsent:
                    return None
            elif remaining <= 0:
                raise TimeoutError("the deadline has passed")
            elif not is_alive() and not self._poll.poll(0):
                raise EOFError("the process has ended")
        answer = bytes(self._received[:end])
        del self._received[: end + 1]
        return answer

    def _read(self) -> None:
        piece = os.read(self._answers, _CHUNK)
        if not piece:
            raise EOFError("the pipe is closed")
        self._received += piece
        if len(self._received) > self._longest_line:
            raise ValueError(f"a line exceeds {self._longest_line} bytes")

    def _write(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: os.write(self._requests, self._unsent[:_CHUNK])]
        except BlockingIOError:
            return
        except BrokenPipeError:  # answers may still be in the other pipe; its end is the error
            self._unsent.clear()
        self._poll.unregister(self._requests)


class Child:
    """A running process with its pipes."""

    def __init__(
        self,
        setup: bytes,
        memory_limit_mb: int | None,
        *,
        start_timeout_s: float = 120.0,
        module: str = "strop.rewards.worker.child",
        what: str = "reward function",
        section: str = "reward_model",
        longest_line: int = _LONGEST_LINE,
    ) -> None:
        """Start ``module``, send ``setup``, and wait until it is ready.

        ``what`` it runs, and the ``section`` of its limits, are for errors; ``longest_line`` is in bytes.
        Raises ``RewardError`` if it cannot load the function, ends three times before it is ready, or does
        not answer.
        """
        self._what, self._longest_line = what, longest_line
        self.memory_limit = ""  # for error texts
        if memory_limit_mb is not None:
            self.memory_limit = f"its memory is limited by {section}.memory_limit_mb={memory_limit_mb}"
        command = [sys.executable, "-P", "-m", module]  # -P: a random.py here must not shadow the library's
        for is_last in (False, False, True):
            self._start(command, memory_limit_mb or 0)
            try:
                self._greet(setup, start_timeout_s)
                return
            except EOFError:  # from outside, something may have killed it
                ending = self.kill()
                if is_last:
                    raise RewardError(f"the process for the {what} did not start: {ending}") from None
            except BaseException:
                self.kill()
                raise

    def _start(self, command: list[str], memory_mb: int) -> None:
        marker = uuid.uuid4().hex
        lifeline, own_end = os.pipe()
        try:
            self.process = subprocess.Popen(
                [*command, str(lifeline), str(memory_mb)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(lifeline,),
                start_new_session=True,  # a separate group, which the terminal's Ctrl-C does not reach
                # a set prints alike in the process of a resumed run
                env={"PYTHONHASHSEED": "0", **os.environ, MARKER: marker},
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
        self.lane = Lane(self._requests.fileno(), answers.fileno(), self._longest_line)
        self.output = OutputReader(errors)
        self.has_answered = False

    def _greet(self, setup: bytes, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        self.lane.post(setup)
        try:
            while (message := self.lane.exchange(deadline, self.is_alive)) is None:
                pass
            status, error = _read_greeting(message, self._what)
        except TimeoutError:
            raise RewardError(
                f"the process for the {self._what} did not start within {timeout_s:g} s; "
                "does its module do long work when it is imported?"
            ) from None
        if status != "ready":
            limit = f" ({self.memory_limit})" if self.memory_limit else ""
            raise RewardError(
                f"the {self._what} cannot be loaded in the process that runs it{limit}:\n{error}"
            )

    def is_alive(self) -> bool:
        """Return True if it runs; do not reap it, so that its process id stays reserved."""
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:  # SIGCHLD is ignored, so the kernel has reaped it
            return False

    def is_gone(self) -> bool:
        """Return True if it ended, or wrote without a request, between two samples."""
        return not self.lane.is_quiet() or not self.is_alive()

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


def _read_greeting(message: bytes, what: str) -> tuple[str, str]:
    """Return status and error of the first answer. Raises ``RewardError`` if it is anything else."""
    try:
        match json.loads(message):
            case {"status": "ready" | "raised" as status, "error": str(error)}:
                return status, error
    except (ValueError, RecursionError):
        pass
    raise RewardError(f"the module of the {what} wrote {message!r:.80} into its process's pipe when imported")


def read_answer(line: bytes) -> tuple[str, Outcome]:
    """Return token and outcome of an answer.

    Raises ``ValueError`` for anything that ``child`` does not send: a scorer can find and use the pipe of its
    process.
    """
    try:
        answer = json.loads(line)
    except RecursionError as error:
        raise ValueError("brackets are nested too deeply") from error
    match answer:
        case {
            "token": str(token),
            "status": "scored" | "raised" | "timeout" | "crashed" as status,
            "score": float() | None as score,
            "parts": dict(parts),
            "error": str(error),
        } if bool(error) == (status != "scored"):
            error.encode()  # raises for lone surrogates, which no file or terminal takes
            return token, Outcome(status, score, parts, error)
    raise ValueError(f"{line!r:.80} is no answer to the sample")
