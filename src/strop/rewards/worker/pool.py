"""Scoring processes as a run uses them: ``RewardPool`` of ``RewardProcess``, fed with samples by ``Feed``.

One file, because the three have one protocol: who gets a sample, what is in flight, and which sample is at
fault if a process is lost.
"""

from __future__ import annotations

import itertools
import pickle
import queue
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from strop.config.machine import usable_cores
from strop.passed import for_process
from strop.rewards.arguments import Sample, ScoreFunction
from strop.rewards.scorer import Outcome, Scorer, timed_out
from strop.rewards.worker.process import Child, read_answer

_MOST_BY_DEFAULT = 16
_AHEAD = 64  # samples that wait in a process or its pipe, so that it never waits for the next one
_GRACE_S = 1.0  # a process cuts off coroutines at their deadline; this is for one that blocks its event loop
_TICK_S = 0.005  # time until a sample that is added while others are in flight is sent

Maker = Callable[[], Sample]
"""Makes a sample when it is taken: decoding is done in the taker's thread."""


class Cancelled(Exception):
    """The feed was cancelled."""


class Feed:
    """A first-in, first-out queue of samples with an end: filled in one thread, emptied in another."""

    def __init__(self, cancelled: threading.Event | None = None) -> None:
        """Make an empty feed; setting ``cancelled`` cancels it, too, but wakes no waiting ``take``."""
        self._makers: queue.SimpleQueue[Maker | None] = queue.SimpleQueue()  # None: the end
        self.cancelled = cancelled or threading.Event()

    @classmethod
    def of(cls, samples: Iterable[Sample], cancelled: threading.Event | None = None) -> Feed:
        """Make a complete feed."""
        feed = cls(cancelled)
        for sample in samples:
            feed.add(lambda sample=sample: sample)
        feed.end()
        return feed

    def add(self, make: Maker) -> None:
        self._makers.put(make)

    def end(self) -> None:
        self._makers.put(None)

    def cancel(self) -> None:
        """Make ``take`` and ``require_wanted`` raise ``Cancelled``."""
        self.cancelled.set()
        self.end()  # wakes a waiting taker

    def require_wanted(self) -> None:
        """Raise ``Cancelled`` after ``cancel``."""
        if self.cancelled.is_set():
            raise Cancelled

    def take(self, *, wait: bool) -> Sample | None:
        """Return the next sample; None if there is none yet, or, with ``wait``, if there will be none.

        Raises ``Cancelled`` after ``cancel``, and whatever making the sample raises.
        """
        try:
            make = self._makers.get(block=wait)
        except queue.Empty:
            make = None
        else:
            if make is None:
                self.end()  # for the next take
        self.require_wanted()
        return None if make is None else make()


class RewardProcess:
    """One killable process that scores samples, one after another.

    An async function scores up to ``max_concurrency`` samples at the same time on one event loop; a function
    for a batch scores all samples in one call.

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
        names = " or ".join(each.where for each in (self.scorer.own, *self.scorer.parts.values()))
        self._function = for_process(self.scorer, names, "it, or load them inside the function")
        self._child: Child | None = None

    def start(self) -> Child:
        """Start the process unless it runs, and return it.

        Raises ``RewardError`` if the function cannot be loaded in it, or it does not answer.
        """
        if self._child is not None and not self._child.is_gone():
            return self._child
        self.drop()
        setup = sys.path, self._function, self.timeout_s, self.max_concurrency
        self._child = Child(pickle.dumps(setup), self.memory_limit_mb, start_timeout_s=self.start_timeout_s)
        return self._child

    def evaluate(self, sample: Sample, cancelled: threading.Event | None = None) -> Outcome:
        """Score one sample within ``timeout_s`` seconds; raise ``Cancelled`` once ``cancelled`` is set."""
        (outcome,) = self.evaluate_all(Feed.of([sample], cancelled))
        return outcome

    def evaluate_all(self, samples: Feed) -> Generator[Outcome]:
        """Yield each sample's outcome, in order; each has ``timeout_s`` seconds from when it is begun.

        The process begins samples in their order, and further ones are sent ahead. If it hangs, ends or
        writes something else than an answer, the sample that it works at is at fault, and those behind it are
        sent to the next process. Where it may have been another one (several were begun, or an earlier one
        may have written), those that were begun are scored again, each alone. Closing the generator early
        kills the process.

        Raises ``Cancelled`` if ``samples`` are cancelled, and ``RewardError`` as ``start`` does.
        """
        conversation = _Conversation(self, samples)
        try:
            yield from conversation.outcomes()
        except BaseException:  # else the next caller would read these samples' answers
            if conversation.in_flight:
                self.drop()
            raise

    def close(self) -> None:
        """End the process; it has 2 seconds to exit by itself, so that exit handlers run."""
        if self._child is not None:
            self._child.say_goodbye()
            self.drop()

    def drop(self) -> str:
        """Kill the process, if there is one, and return how it ended."""
        child, self._child = self._child, None
        return "" if child is None else child.kill()


@dataclass(slots=True)
class _Request:
    """One call of a process: a sample, or all samples of a batch."""

    token: str
    """Identifies the answers."""
    numbers: list[int]
    contents: list[bytes]
    """The pickled samples."""
    answers: list[Outcome] = field(default_factory=list)
    """Outcomes received so far; fewer than ``numbers`` until the last."""
    deadline: float | None = None
    """None while it waits in the process for one before it."""
    is_alone: bool = False
    """True if nothing else may be in flight, so that a failure is its own."""


class _Conversation:
    """The scoring of one feed by a process, and by its successors where it is lost."""

    def __init__(self, process: RewardProcess, samples: Feed) -> None:
        self.in_flight: dict[str, _Request] = {}
        """Requests without an answer by token, in the order in which the process begins them."""
        self._process, self._samples, self._scorer = process, samples, process.scorer
        concurrent = self._scorer.is_async and not self._scorer.is_batch
        self._window = process.max_concurrency if concurrent else 1
        self._again: deque[_Request] = deque()  # were in flight to a process that is lost
        self._done: dict[int, Outcome] = {}
        self._n_taken = 0
        self._is_alone = False  # if so, the request in flight is alone
        self._child: Child | None = None

    def outcomes(self) -> Generator[Outcome]:
        """Yield the outcome of each sample, in order."""
        following = 0
        while self._fill():
            if self.in_flight:
                self._receive()
            while following in self._done:
                yield self._done.pop(following)
                following += 1

    def _fill(self) -> bool:
        """Send requests while there are some and the process has room; return False after the last one."""
        self._samples.require_wanted()
        while self._has_room():
            request = self._again.popleft() if self._again else self._take()
            if request is None:
                break
            if not self.in_flight:
                self._child = self._process.start()
            assert self._child is not None
            self._child.lane.post(pickle.dumps((request.token, request.contents)))
            self.in_flight[request.token] = request
            self._is_alone = request.is_alone
        return bool(self.in_flight or self._done)

    def _has_room(self) -> bool:
        if not self.in_flight:
            return True
        if self._is_alone or (self._again and self._again[0].is_alone):
            return False
        assert self._child is not None
        return self._child.lane.is_idle and len(self.in_flight) < self._window + _AHEAD

    def _take(self) -> _Request | None:
        """Return a request for the next sample, or for a whole batch; None if there is no sample (yet)."""
        numbers, contents = list[int](), list[bytes]()
        while self._scorer.is_batch or not numbers:
            sample = self._samples.take(wait=self._scorer.is_batch or not (self.in_flight or self._done))
            if sample is None:
                break
            number, self._n_taken = self._n_taken, self._n_taken + 1
            try:
                contents.append(pickle.dumps(sample, protocol=pickle.HIGHEST_PROTOCOL))
                numbers.append(number)
            # Pickling runs user code, which may raise anything; treat it as a sample that raises.
            except Exception as error:  # noqa: BLE001
                found = f"the sample cannot be sent to the scoring process: {error}"
                self._done[number] = Outcome("raised", error=found)
        return _Request(secrets.token_hex(8), numbers, contents) if numbers else None

    def _begun(self) -> list[_Request]:
        """Return the requests that the process works at; set the deadlines of new ones."""
        begun = list(itertools.islice(self.in_flight.values(), self._window))
        for request in reversed(begun):
            if request.deadline is not None:
                break
            grace_s = _GRACE_S if self._scorer.is_async else 0.0
            request.deadline = time.monotonic() + self._process.timeout_s + grace_s
            if self._child is not None:
                self._child.output.allow_more()
        return begun

    def _receive(self) -> None:
        """Wait for one answer, or until there may be another request to send."""
        child, begun = self._child, self._begun()
        deadline = begun[0].deadline
        assert child is not None
        assert deadline is not None
        has_place = len(begun) < self._window and not self._is_alone
        try:
            until = min(deadline, time.monotonic() + _TICK_S) if has_place else deadline
            if (line := child.lane.exchange(until, self._is_alive)) is None:
                return
            token, outcome = read_answer(line)
            request = self.in_flight.get(token)
            if request is None or request.deadline is None:  # a scorer may know its own token only
                raise ValueError(f"{line!r:.80} is no answer to the sample")
            outcome = self._scorer.checked(outcome)
        except TimeoutError:
            if time.monotonic() >= deadline:
                self._process.drop()
                batch = len(begun[0].numbers) if self._scorer.is_batch else None
                self._lost(begun, timed_out(self._process.timeout_s, batch=batch))
        except EOFError:
            ending = self._process.drop()
            self._lost(begun, Outcome("crashed", error=f"the reward function ended its process: {ending}"))
        except ValueError as error:
            self._process.drop()
            found = f"the reward function wrote into its process's pipe: {error}"
            self._lost(begun, Outcome("crashed", error=found), may_be_earlier=child.has_answered)
        else:
            request.answers.append(outcome)
            if outcome.status == "crashed":
                self._process.drop()
                self._finish(request, outcome)
                self._send_again([other for other in begun if other is not request])
            elif len(request.answers) == len(request.numbers):
                child.has_answered = True
                self._finish(request, outcome)

    def _is_alive(self) -> bool:
        self._samples.require_wanted()  # polled: cancelling must not wait for a sample that hangs
        return self._child is not None and self._child.is_alive()

    def _finish(self, request: _Request, outcome: Outcome) -> None:
        """Record the answers to a request; its samples without an answer get ``outcome``."""
        del self.in_flight[request.token]
        missing = len(request.numbers) - len(request.answers)
        self._done |= zip(request.numbers, request.answers + [outcome] * missing, strict=True)

    def _lost(self, begun: Sequence[_Request], outcome: Outcome, *, may_be_earlier: bool = False) -> None:
        """Give the only request that a lost process worked at this outcome; send several again."""
        if len(begun) == 1 and not may_be_earlier:
            self._finish(begun[0], outcome)
            begun = []
        self._send_again(begun)

    def _send_again(self, suspects: Sequence[_Request]) -> None:
        """Send what is in flight again, the ``suspects`` each alone."""
        for request in suspects:
            request.is_alone = True
        for request in self.in_flight.values():
            request.deadline = None
            request.answers.clear()
        self._again.extendleft(reversed(self.in_flight.values()))
        self.in_flight.clear()


def default_num_workers() -> int:
    """Return the number of cores that this process may use, at most 16."""
    return min(usable_cores(), _MOST_BY_DEFAULT)


class RewardPool:
    """Up to ``num_workers`` of ``RewardProcess``, with the same interface.

    Async functions and functions for a batch have one process in any case. A process gets its next sample
    after it has answered the last one, so that no sample waits behind one that hangs while another process is
    free. A process that hangs or ends is replaced while the others work.

    Raises:
        ConfigError: the function cannot be pickled.
    """

    def __init__(self, function: ScoreFunction | Scorer, *, num_workers: int, **limits: Any) -> None:
        """``limits`` are the further arguments of ``RewardProcess``."""
        scorer = Scorer.of(function)
        processes = 1 if scorer.is_batch or scorer.is_async else num_workers
        self._processes = [RewardProcess(scorer, **limits) for _ in range(processes)]

    def start(self) -> None:
        """Start one process, to find errors early; the others start when samples wait for them.

        Raises ``RewardError`` as ``RewardProcess.start`` does.
        """
        self._processes[0].start()

    def evaluate_all(self, samples: Feed) -> Generator[Outcome]:
        """Yield the outcome of each sample, in the order of the samples; they are scored in any order.

        The deadline of a sample starts when a process gets it. Closing the generator early cancels the feed
        and kills the processes that have a sample. Raises as ``RewardProcess.evaluate_all`` does.
        """
        if len(self._processes) == 1:  # it gets samples ahead
            yield from self._processes[0].evaluate_all(samples)
            return
        taking, numbers = threading.Lock(), itertools.count()
        found: queue.SimpleQueue[tuple[int, Outcome] | BaseException | None] = queue.SimpleQueue()

        def take() -> tuple[int, Sample] | None:
            with taking:
                sample = samples.take(wait=True)
                return None if sample is None else (next(numbers), sample)

        def work(process: RewardProcess) -> None:
            try:
                while (taken := take()) is not None:
                    number, sample = taken
                    found.put((number, process.evaluate(sample, samples.cancelled)))
                found.put(None)
            # Re-raised in the thread that waits for the outcomes.
            except BaseException as error:  # noqa: BLE001
                found.put(error)

        # Daemon threads: a run that fails elsewhere does not wait for scores.
        threads = [
            threading.Thread(target=work, args=(process,), name="strop-reward-pool", daemon=True)
            for process in self._processes
        ]
        try:
            for thread in threads:
                thread.start()
            yield from _in_order(found, len(threads))
        finally:
            samples.cancel()
            for thread in threads:
                thread.join()

    def close(self) -> None:
        """End the processes in parallel; each has 2 seconds to exit by itself."""
        with ThreadPoolExecutor(len(self._processes)) as closing:
            list(closing.map(RewardProcess.close, self._processes))


def _in_order(
    found: queue.SimpleQueue[tuple[int, Outcome] | BaseException | None], workers: int
) -> Generator[Outcome]:
    """Yield numbered outcomes, each as soon as all before it are done, until every worker has put None."""
    outcomes: dict[int, Outcome] = {}
    following = 0
    while workers:
        match found.get():
            case None:
                workers -= 1
            case BaseException() as error:
                raise error
            case number, outcome:
                outcomes[number] = outcome
        while following in outcomes:
            yield outcomes.pop(following)
            following += 1
