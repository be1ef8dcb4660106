"""The rewards of one batch, scored in a thread while samples are generated and models evaluate them.

``ScoringJob`` feeds the scoring processes and stops when too many samples fail (``ErrorBudget``);
``PendingSamples`` gives it the samples of a batch as they are finished. B samples, T padded response tokens.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from strop.errors import RewardError
from strop.protocol import DataProto
from strop.rewards.base import PendingReward
from strop.rewards.reward_output import RewardOutput
from strop.rewards.worker.feed import Feed, Maker
from strop.rewards.worker.pool import RewardPool
from strop.rewards.worker.process import RewardProcess
from strop.rewards.worker.records import Outcome, Sample
from strop.terminal import printable

logger = logging.getLogger(__name__)

WINDOW = 256
_SHOWN_CHARACTERS = 200
_LOG_EVERY_S = 10.0


class ErrorBudget:
    """Count failed samples over a window: the current batch and earlier ones, 256 samples in total.

    A larger batch is judged alone. Without the window, one failure in a batch of four would exceed any rate;
    for the same reason one failure is always allowed, unless ``max_rate`` is 0.
    """

    def __init__(self, max_rate: float) -> None:
        self.max_rate = max_rate
        self._before: deque[bool] = deque(maxlen=WINDOW)
        self._allowed = math.inf
        self._failed = 0

    def begin(self, samples: int) -> None:
        """Start a batch of this many samples."""
        kept = list(self._before)[-(WINDOW - samples) :] if samples < WINDOW else []
        self._failed = sum(kept)
        allowed = self.max_rate * (len(kept) + samples)
        self._allowed = max(allowed, 1.0) if self.max_rate > 0 else 0.0

    def count(self, failed: bool) -> bool:
        """Count one sample; return True if the batch exceeds the budget even if all others succeed."""
        self._failed += failed
        return self._failed > self._allowed

    def end(self, failed: Iterable[bool]) -> None:
        """Add the finished batch to the window, by row, so that its state does not depend on timing."""
        self._before.extend(failed)


class ScoringJob:
    """Score the samples of one batch of B rows in a thread, in the order in which they are added.

    Jobs use the process or pool in sequence; ``after`` is the preceding one.
    """

    def __init__(
        self,
        process: RewardProcess | RewardPool,
        budget: ErrorBudget,
        *,
        n_rows: int,
        n_scored: int,
        after: ScoringJob | None = None,
    ) -> None:
        """Start the thread; ``n_scored`` of the ``n_rows`` rows will be added."""
        self.samples: list[Sample | None] = [None] * n_rows
        """By row; None for rows that were not added."""
        self._process, self._budget, self._n_scored = process, budget, n_scored
        self._feed = Feed()
        self._rows: list[int] = []  # row numbers in the order of the feed
        self._n_done = 0
        self._outcomes: list[Outcome | None] = [None] * n_rows
        self._failure: BaseException | None = None
        self._after = after
        # Daemon thread: a run that fails elsewhere does not wait for scores.
        self._thread = threading.Thread(target=self._run, name="strop-reward-scoring", daemon=True)
        self._thread.start()

    def add(self, row: int, make: Maker) -> None:
        """Add a row; ``make`` is called in the scoring thread. Not thread-safe."""

        def sample() -> Sample:
            made = self.samples[row] = make()
            return made

        self._rows.append(row)
        self._feed.add(sample)

    def end(self) -> None:
        """Mark the batch as complete."""
        self._feed.end()

    def cancel(self, *, with_earlier: bool = False) -> None:
        """Cancel; outcomes will not be read. The process is idle or dead soon afterwards."""
        self._feed.cancel()
        if with_earlier and (before := self._after) is not None:
            before.cancel(with_earlier=True)

    def wait(self) -> None:
        """Wait for the thread, and ignore its errors."""
        self._thread.join()

    def outcomes(self) -> list[Outcome | None]:
        """Wait for the outcomes, by row; None for rows that were not added. Log progress of a long wait.

        Raises:
            RewardError: a score or part is NaN or infinite (with the sample), or more samples failed than the
                budget allows (with the first traceback).
        """
        started = time.monotonic()
        while self._thread.is_alive():
            self._thread.join(_LOG_EVERY_S)
            if self._thread.is_alive():
                logger.info(  # log lines, because a progress bar would break the live table
                    "scoring: %d of %d samples are done; waited for %.0f s",
                    self._n_done,
                    self._n_scored,
                    time.monotonic() - started,
                )
        if self._failure is not None:
            raise self._failure
        return self._outcomes

    def _run(self) -> None:
        if self._after is not None:
            self._after.wait()
            self._after = None  # else every job would keep all earlier ones alive
        try:
            self._score()
        # Re-raised by outcomes(), in the caller's thread.
        except BaseException as failure:  # noqa: BLE001
            self._failure = failure

    def _score(self) -> None:
        self._budget.begin(self._n_scored)
        failed, first_error = 0, ""
        with contextlib.closing(self._process.evaluate_all(self._feed)) as outcomes:
            for number, outcome in enumerate(outcomes):
                row = self._rows[number]
                sample = self.samples[row]
                name = name_sample(row, sample) if sample and (outcome.error or not outcome.is_finite) else ""
                if not outcome.is_finite:
                    found = {"score": outcome.score, **outcome.parts}
                    bad = [f"{part}={value}" for part, value in found.items() if not math.isfinite(value)]
                    raise RewardError(f"the reward function returned {', '.join(bad)} for {name}")
                self._outcomes[row] = outcome
                self._n_done = number + 1
                if outcome.error:
                    failed += 1
                    if failed == 1:
                        first_error = printable(f"{name}:\n{outcome.error}")
                        logger.warning("could not score %s", first_error)
                if self._budget.count(bool(outcome.error)):
                    raise RewardError(
                        f"too many samples cannot be scored: {failed} of the first {number + 1} samples of a "
                        f"batch of {len(self.samples)} "
                        f"(reward_model.max_error_rate={self._budget.max_rate:g}). "
                        f"The first was {first_error}"
                    )
        self._budget.end(bool(outcome.error) for outcome in self._outcomes if outcome is not None)


def name_sample(row: int, sample: Sample) -> str:
    """Describe a sample for an error text."""
    index = sample.extra_info.get("index") if isinstance(sample.extra_info, Mapping) else None
    known = "" if index is None else f", extra_info.index={index}"
    text = sample.solution_str
    shown = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
    return f"sample {row} (data_source={sample.data_source!r}{known}, response={shown!r})"


class PendingSamples(PendingReward):
    """Rewards of a batch whose samples are added as they are finished, and then completed."""

    takes_samples = True

    def __init__(
        self,
        job: ScoringJob,
        is_scored: Sequence[bool],
        sample: Callable[[int, list[int]], Sample],
        compose: Callable[..., RewardOutput],
    ) -> None:
        """Expect a row for each of ``is_scored``, True where a function scores it.

        ``sample`` makes the scorer's input from a row and its tokens; ``compose`` makes the rewards of batch,
        samples, outcomes and the reward model's scores.
        """
        self._job, self._is_scored, self._sample, self._compose = job, is_scored, sample, compose
        self._token_ids: list[list[int] | None] = [None] * len(is_scored)
        self._adding = threading.Lock()
        self._batch = DataProto()

    def add(self, row: int, token_ids: list[int]) -> None:
        """Score a finished response, given its tokens. Thread-safe; a row counts once."""
        with self._adding:
            if self._token_ids[row] is not None:
                return
            self._token_ids[row] = token_ids
            make = functools.partial(self._sample, row, token_ids)
            if self._is_scored[row]:
                self._job.add(row, make)
            else:
                self._job.samples[row] = make()

    def complete(self, batch: DataProto) -> None:
        """Set the batch, with ``responses`` and ``response_mask`` [B, T], and add its remaining rows.

        Raises ``RewardError`` if a sample was added with other tokens than it has here.
        """
        for row, token_ids in enumerate(real_tokens(batch.batch["responses"], batch.batch["response_mask"])):
            self.add(row, token_ids)
            if self._token_ids[row] != token_ids:
                self.cancel()
                raise RewardError(
                    f"sample {row}: the scored tokens {self._token_ids[row]} differ from the generated ones "
                    f"{token_ids}"
                )
        self._batch = batch
        self._job.end()

    def cancel(self) -> None:
        """Cancel scoring; the rewards will not be read."""
        self._job.cancel()

    def get(self, model_scores: Tensor | None = None) -> RewardOutput:
        """Wait for the rewards; ``model_scores`` [B] are the reward model's. Raises as the manager does."""
        outcomes = self._job.outcomes()
        samples = [sample for sample in self._job.samples if sample is not None]
        return self._compose(self._batch, samples, outcomes, model_scores)


def real_tokens(ids_BT: Tensor, mask_BT: Tensor) -> list[list[int]]:
    """Return the token ids of each row where the mask is 1."""
    rows = zip(ids_BT.cpu(), mask_BT.cpu().bool(), strict=True)
    return [ids_T[mask_T].tolist() for ids_T, mask_T in rows]
