"""``RewardProcess``: a scorer in a separate process, which is killed at a deadline and restarted."""

from __future__ import annotations

import json
import pickle
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator

import cloudpickle

from strop.errors import ConfigError, RewardError
from strop.rewards.scorer import Scorer
from strop.rewards.worker import wire
from strop.rewards.worker.concurrent import concurrently, whole_batch
from strop.rewards.worker.feed import Feed
from strop.rewards.worker.records import (
    Outcome,
    Request,
    Sample,
    ScoreFunction,
    encode,
    read_outcome,
    timed_out,
)
from strop.rewards.worker.running import Child


class RewardProcess:
    """One killable process that evaluates one sample after another.

    An async function scores up to ``max_concurrency`` samples at the same time on one event loop; a function
    for a batch scores all samples in one call (:mod:`strop.rewards.worker.concurrent`).

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
        function: ScoreFunction | Scorer,
        *,
        timeout_s: float = 10.0,
        start_timeout_s: float = 120.0,
        memory_limit_mb: int | None = None,
        max_concurrency: int = 32,
    ) -> None:
        self.timeout_s = timeout_s
        self.start_timeout_s = start_timeout_s
        self.memory_limit_mb = memory_limit_mb
        self.max_concurrency = max_concurrency
        self.scorer = Scorer.of(function)
        try:
            self._function = cloudpickle.dumps(self.scorer)
        # Pickling runs user code, which may raise anything.
        except Exception as error:
            raise ConfigError(
                f"the reward function {function!r} cannot be pickled for its process ({error}); "
                "keep open files, locks and models out of it, or load them inside the function"
            ) from error
        self._child: Child | None = None

    def __enter__(self) -> RewardProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def start(self) -> Child:
        """Start the process unless it runs, and return it.

        Raises ``RewardError`` if the function cannot be loaded in it, or it does not answer.
        """
        if self._child is not None and not self._child.is_gone():
            return self._child
        self.drop()
        child = Child(self.memory_limit_mb)
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
        if self.scorer.is_batch:
            yield from whole_batch(self, samples)
            return
        if self.scorer.is_async:
            yield from concurrently(self, samples)
            return
        waiting: deque[Request | Outcome] = deque()  # without an answer, or with an outcome known already
        try:
            while (sample := samples.take(wait=True)) is not None:
                waiting.append(encode(sample))
                while waiting:
                    yield from self._converse(waiting, samples)
        except BaseException:  # else the next caller would read this sample's answer
            if waiting:
                self.drop()
            raise

    def _converse(self, waiting: deque[Request | Outcome], samples: Feed) -> Iterator[Outcome]:
        """Exchange messages with one process until nothing is waiting or the process is lost."""
        child = self.start()
        lane = wire.Lane(child.requests, child.answers)
        for request in waiting:
            if isinstance(request, Request):
                lane.post(pickle.dumps(tuple(request)))
        deadline = self._next_deadline(child)
        while waiting and self._child is child:
            samples.require_wanted()
            if lane.is_idle and (sample := samples.take(wait=False)) is not None:
                waiting.append(request := encode(sample))
                if isinstance(request, Request):
                    lane.post(pickle.dumps(tuple(request)))
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
            self.drop()

    def _next_deadline(self, child: Child) -> float:
        """Start the current sample: return its deadline and reset its output allowance."""
        child.output.allow_more()
        return time.monotonic() + self.timeout_s

    def _receive(
        self, child: Child, lane: wire.Lane, token: str, deadline: float, samples: Feed
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
                    self.drop()
            return outcome
        except TimeoutError:
            self.drop()
            return timed_out(self.timeout_s)
        except EOFError:
            return Outcome("crashed", error=f"the reward function ended its process: {self.drop()}")
        except ValueError as error:
            self.drop()
            if child.has_answered:
                return None
            return Outcome("crashed", error=f"the reward function wrote into its process's pipe: {error}")

    def close(self) -> None:
        """End the process; it has 2 seconds to exit by itself, so that exit handlers run."""
        if self._child is not None:
            self._child.say_goodbye()
            self.drop()

    def _greet(self, child: Child) -> None:
        """Send the function, and wait until the process is ready for samples."""
        deadline = time.monotonic() + self.start_timeout_s
        lane = wire.Lane(child.requests, child.answers)
        lane.post(pickle.dumps((sys.path, self._function, self.timeout_s, self.max_concurrency)))
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

    def drop(self) -> str:
        """Kill the process, if there is one, and return how it ended."""
        child, self._child = self._child, None
        return "" if child is None else child.kill()


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
