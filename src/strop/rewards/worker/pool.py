"""``RewardPool``: several scoring processes that share one feed."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

from strop.rewards.worker.feed import Feed
from strop.rewards.worker.process import RewardProcess
from strop.rewards.worker.records import Outcome, Sample, ScoreFunction

_MOST_BY_DEFAULT = 16


def default_num_workers() -> int:
    """Return the number of cores that this process may use, at most 16."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST_BY_DEFAULT)


class RewardPool:
    """Up to ``num_workers`` of ``RewardProcess``, with the same interface.

    A process gets its next sample after it has answered the last one, so that no sample waits behind one that
    hangs while another process is free. A process that hangs or ends is replaced while the others work.

    Raises:
        ConfigError: the function cannot be pickled.
    """

    def __init__(
        self,
        function: ScoreFunction,
        *,
        num_workers: int,
        timeout_s: float = 10.0,
        start_timeout_s: float = 120.0,
    ) -> None:
        self._processes = [
            RewardProcess(function, timeout_s=timeout_s, start_timeout_s=start_timeout_s)
            for _ in range(num_workers)
        ]

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
        work = _SharedWork(samples, workers=len(self._processes))
        # Daemon threads: a run that fails elsewhere does not wait for scores.
        threads = [
            threading.Thread(target=work.do, args=(process,), name="strop-reward-pool", daemon=True)
            for process in self._processes
        ]
        try:
            for thread in threads:
                thread.start()
            yield from work.outcomes()
        finally:
            samples.cancel()
            for thread in threads:
                thread.join()

    def close(self) -> None:
        """End the processes in parallel; each has 2 seconds to exit by itself."""
        with ThreadPoolExecutor(len(self._processes)) as closing:
            list(closing.map(RewardProcess.close, self._processes))


class _SharedWork:
    """Distributes the samples of a feed, and restores the order of their outcomes."""

    def __init__(self, samples: Feed, *, workers: int) -> None:
        self.samples = samples
        self._taking = threading.Lock()
        self._taken = itertools.count()
        self._changed = threading.Condition()
        self._outcomes: dict[int, Outcome] = {}
        self._workers = workers
        self._failure: BaseException | None = None

    def do(self, process: RewardProcess) -> None:
        """Evaluate samples in one process until the feed ends. Runs in a separate thread per process."""
        share = _Share(self)
        failure: BaseException | None = None
        try:
            for outcome in process.evaluate_all(share):
                with self._changed:
                    self._outcomes[share.number] = outcome
                    self._changed.notify()
        # Re-raised in the thread that waits for the outcomes.
        except BaseException as error:  # noqa: BLE001
            failure = error
        with self._changed:
            self._workers -= 1
            self._failure = self._failure or failure
            self._changed.notify()

    def take(self) -> tuple[int, Sample] | None:
        """Return the next sample and its number; None at the end. Raises as ``Feed.take`` does."""
        with self._taking:
            sample = self.samples.take(wait=True)
            return None if sample is None else (next(self._taken), sample)

    def outcomes(self) -> Generator[Outcome]:
        """Yield outcomes in the order of the samples, each as soon as all before it are done."""
        for number in itertools.count():
            with self._changed:
                while number not in self._outcomes and self._workers and self._failure is None:
                    self._changed.wait()
                if self._failure is not None:
                    raise self._failure
                if number not in self._outcomes:
                    return
                outcome = self._outcomes.pop(number)
            yield outcome


class _Share:
    """The samples of one process, one at a time, none sent ahead."""

    def __init__(self, work: _SharedWork) -> None:
        self._work = work
        self.number = -1
        """Number of the sample taken last."""

    def take(self, *, wait: bool) -> Sample | None:
        """Return the next sample if the process has none, which is when it can ``wait`` for one."""
        taken = self._work.take() if wait else None
        if taken is None:
            return None
        self.number, sample = taken
        return sample

    def require_wanted(self) -> None:
        """Raise ``Cancelled`` if the outcomes will not be read."""
        self._work.samples.require_wanted()
