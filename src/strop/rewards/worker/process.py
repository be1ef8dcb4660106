"""``RewardProcess``: a scorer in a separate process, which is killed at a deadline and restarted."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import pickle
import secrets
import select
import subprocess
import sys
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Generator, Iterator
from typing import IO, Any, NamedTuple

import cloudpickle

from strop.errors import ConfigError, RewardError
from strop.rewards.process_tree import MARKER, describe_exit, hold_descendants, kill_held, kill_tree
from strop.rewards.worker import wire
from strop.rewards.worker.feed import Feed
from strop.rewards.worker.records import Outcome, Sample, ScoreFunction, read_outcome
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


class RewardProcess:
    """One killable process that evaluates one sample after another.

    ``function`` is sent by cloudpickle, so that functions from a script or a notebook work; the program's
    main module is not run again, and nothing is forked. A sample that raises, exceeds ``timeout_s`` seconds
    or ends the process has an :class:`Outcome` with the reason; the next one gets a new process. No process
    outlives ``close``, the object, or the program, even if that is killed. ``memory_limit_mb`` limits the
    private memory of the process, and of each that it starts.

    A pool of multiprocessing or pebble does not do: both unpickle results in the run's process, run the main
    module again, leave what a killed scorer started, and leave a hanging worker when the program is killed.

    Not thread-safe: a ``RewardPool`` has one per thread.

    Raises:
        ConfigError: the function cannot be pickled.
    """

    def __init__(
        self,
        function: ScoreFunction,
        *,
        timeout_s: float = 10.0,
        start_timeout_s: float = 120.0,
        memory_limit_mb: int | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self.start_timeout_s = start_timeout_s
        self.memory_limit_mb = memory_limit_mb
        try:
            self._function = cloudpickle.dumps(function)
        # Pickling runs user code, which may raise anything.
        except Exception as error:
            raise ConfigError(
                f"the reward function {function!r} cannot be pickled for its process ({error}); "
                "keep open files, locks and models out of it, or load them inside the function"
            ) from error
        self._child: _Child | None = None

    def __enter__(self) -> RewardProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def start(self) -> _Child:
        """Start the process unless it runs, and return it.

        Raises ``RewardError`` if the function cannot be loaded in it, or it does not answer.
        """
        if self._child is not None and not self._child.is_gone():
            return self._child
        self._drop()
        child = _Child(self.memory_limit_mb)
        try:
            self._greet(child)
        except BaseException:
            child.kill()
            raise
        self._child = child
        return child

    def evaluate(self, sample: Sample, cancelled: threading.Event | None = None) -> Outcome:
        """Score one sample within ``timeout_s`` seconds; raise ``Cancelled`` once ``cancelled`` is set."""
        (outcome,) = self.evaluate_all(Feed.of([sample], cancelled))
        return outcome

    def evaluate_all(self, samples: Feed) -> Generator[Outcome]:
        """Yield each sample's outcome, in order; each has ``timeout_s`` seconds from the end of the last.

        Sends as many samples ahead as fit into the pipe, so that the process never waits for the next one. It
        answers in order: if it hangs or ends, the first sample without an answer is at fault, and those
        behind it are sent again to the next process. So is that sample if there is something else than its
        answer in the pipe, and the process has answered others before: one of these may have written it.
        Closing the generator early kills the process.

        Raises ``Cancelled`` if ``samples`` are cancelled, and ``RewardError`` as ``start`` does.
        """
        waiting: deque[_Request | Outcome] = deque()  # without an answer, or with an outcome known already
        try:
            while (sample := samples.take(wait=True)) is not None:
                waiting.append(_encode(sample))
                while waiting:
                    yield from self._converse(waiting, samples)
        except BaseException:  # else the next caller would read this sample's answer
            if waiting:
                self._drop()
            raise

    def _converse(self, waiting: deque[_Request | Outcome], samples: Feed) -> Iterator[Outcome]:
        """Exchange messages with one process until nothing is waiting or the process is lost."""
        child = self.start()
        lane = wire.Lane(child.requests, child.answers)
        for request in waiting:
            if isinstance(request, _Request):
                lane.post(request.message)
        deadline = self._next_deadline(child)
        while waiting and self._child is child:
            samples.require_wanted()
            if lane.is_idle and (sample := samples.take(wait=False)) is not None:
                waiting.append(request := _encode(sample))
                if isinstance(request, _Request):
                    lane.post(request.message)
            first = waiting[0]
            if isinstance(first, Outcome):
                outcome = first
            else:
                outcome = self._receive(child, lane, first.token, deadline, samples)
            if outcome is not None:
                waiting.popleft()
                yield outcome
                deadline = self._next_deadline(child)
        if lane.has_rest:  # written by a thread or child of the scorer
            self._drop()

    def _next_deadline(self, child: _Child) -> float:
        """Start the current sample: return its deadline and reset its output allowance."""
        child.output.allow_more()
        return time.monotonic() + self.timeout_s

    def _receive(
        self, child: _Child, lane: wire.Lane, token: str, deadline: float, samples: Feed
    ) -> Outcome | None:
        """Return the next outcome; None if there is room for more samples, or a new process is needed."""

        def is_alive() -> bool:
            samples.require_wanted()  # polled: cancelling must not wait for a sample that hangs
            return child.is_alive()

        try:
            answer = lane.exchange(deadline, is_alive)
            outcome = None if answer is None else read_outcome(answer, token)
            if outcome is not None:
                child.has_answered = True
                if outcome.status == "crashed":
                    self._drop()
            return outcome
        except TimeoutError:
            self._drop()
            return Outcome(
                "timeout", error=f"the reward function took longer than {self.timeout_s:g} s and was cut off"
            )
        except EOFError:
            return Outcome("crashed", error=f"the reward function ended its process: {self._drop()}")
        except ValueError as error:
            self._drop()
            if child.has_answered:
                return None
            return Outcome("crashed", error=f"the reward function wrote into its process's pipe: {error}")

    def close(self) -> None:
        """End the process; it has 2 seconds to exit by itself, so that exit handlers run."""
        if self._child is not None:
            self._child.say_goodbye()
            self._drop()

    def _greet(self, child: _Child) -> None:
        """Send the function, and wait until the process is ready for samples."""
        deadline = time.monotonic() + self.start_timeout_s
        lane = wire.Lane(child.requests, child.answers)
        lane.post(pickle.dumps((sys.path, self._function)))
        try:
            while (message := lane.exchange(deadline, child.is_alive)) is None:
                pass
            status, error = _read_greeting(message)
        except TimeoutError:
            raise RewardError(
                f"the process for the reward function did not start within {self.start_timeout_s:g} s; "
                "does its module do long work when it is imported?"
            ) from None
        except EOFError:
            raise RewardError(f"the process for the reward function did not start: {child.kill()}") from None
        if status != "ready":
            limit = f" ({limit})" if (limit := child.memory_limit) else ""
            raise RewardError(
                f"the reward function cannot be loaded in the process that runs it{limit}:\n{error}"
            )

    def _drop(self) -> str:
        """Kill the process, if there is one, and return how it ended."""
        child, self._child = self._child, None
        return "" if child is None else child.kill()


class _Request(NamedTuple):
    """A message with a sample, and the token that its answer must have."""

    token: str
    message: bytes


def _encode(sample: Sample) -> _Request | Outcome:
    """Return the request for a sample, or its outcome if it cannot be pickled."""
    token = secrets.token_hex(8)
    try:
        return _Request(token, pickle.dumps((token, pickle.dumps(sample, protocol=pickle.HIGHEST_PROTOCOL))))
    # Pickling runs user code, which may raise anything; treat it as a sample that raises in the scorer.
    except Exception as error:  # noqa: BLE001
        return Outcome("raised", error=f"the sample cannot be sent to the scoring process: {error}")


def _read_greeting(message: bytes) -> tuple[str, str]:
    """Return status and error of the first answer. Raises ``RewardError`` if it is anything else."""
    try:
        match json.loads(message):
            case {"status": "ready" | "raised" as status, "error": str(error)}:
                return status, error
    except (ValueError, RecursionError):
        pass
    raise RewardError(
        f"the module of the reward function wrote {message!r:.80} into its process's pipe when imported"
    )


class _Child:
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
