"""``RewardPool``: several scoring processes that share one feed."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from strop.config.machine import usable_cores
from strop.rewards.scorer import Scorer
from strop.rewards.worker.feed import Feed
from strop.rewards.worker.process import RewardProcess
from strop.rewards.worker.records import Outcome, Sample, ScoreFunction

_MOST_BY_DEFAULT = 16


def default_num_workers() -> int:
    """Return the number of cores that this process may use, at most 16."""
    return min(usable_cores(), _MOST_BY_DEFAULT)


def reward_process(
    function: ScoreFunction | Scorer,
    *,
    num_workers: int,
    timeout_s: float,
    memory_limit_mb: int | None = None,
    max_concurrency: int = 32,
) -> RewardProcess | RewardPool:
    """Return one process, or several; async functions and functions for a batch have one in any case."""
    scorer = Scorer.of(function)
    if num_workers == 1 or scorer.is_batch or scorer.is_async:
        return RewardProcess(
            scorer,
            timeout_s=timeout_s,
            memory_limit_mb=memory_limit_mb,
            max_concurrency=max_concurrency,
        )
    return RewardPool(scorer, num_workers=num_workers, timeout_s=timeout_s, memory_limit_mb=memory_limit_mb)


class RewardPool:
    """Up to ``num_workers`` of ``RewardProcess``, with the same interface.

    A process gets its next sample after it has answered the last one, so that no sample waits behind one that
    hangs while another process is free. A process that hangs or ends is replaced while the others work.

    Raises:
        ConfigError: the function cannot be pickled.
    """

    def __init__(
        self,
        function: ScoreFunction | Scorer,
        *,
        num_workers: int,
        timeout_s: float = 10.0,
        start_timeout_s: float = 120.0,
        memory_limit_mb: int | None = None,
    ) -> None:
        self._processes = [
            RewardProcess(
                function,
                timeout_s=timeout_s,
                start_timeout_s=start_timeout_s,
                memory_limit_mb=memory_limit_mb,
            )
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
        taking, numbers = threading.Lock(), itertools.count()
        found: SimpleQueue[tuple[int, Outcome] | BaseException | None] = SimpleQueue()

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
    found: SimpleQueue[tuple[int, Outcome] | BaseException | None], workers: int
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
