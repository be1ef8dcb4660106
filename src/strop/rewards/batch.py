"""The rewards of one batch, scored in a thread while samples are generated and models evaluate them.

``ScoringJob`` feeds the scoring processes and stops when too many samples fail (``ErrorBudget``);
``PendingSamples`` gives it the samples of a batch as they are finished. B samples, T padded response tokens.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from strop.columns import ENDED_BY
from strop.errors import RewardError
from strop.protocol import DataProto
from strop.rewards.arguments import Played, Sample, ids_of_prompt
from strop.rewards.base import PendingReward
from strop.rewards.reward_output import (
    ErrorBudget,
    RewardOutput,
    log_first,
    lost_in,
    name_row,
    real_tokens,
    scored_by_programs,
)
from strop.rewards.scorer import Outcome
from strop.rewards.worker.pool import Feed, Maker, RewardPool

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 10.0


class ScoringJob:
    """Score the samples of one batch of B rows in a thread, in the order in which they are added.

    Jobs use the pool in sequence; ``after`` is the preceding one.
    """

    def __init__(
        self,
        pool: RewardPool,
        budget: ErrorBudget,
        *,
        n_rows: int,
        n_scored: int,
        after: ScoringJob | None = None,
    ) -> None:
        """Start the thread; ``n_scored`` of the ``n_rows`` rows will be added."""
        self.samples: list[Sample | None] = [None] * n_rows
        """By row; None for rows that were not added."""
        self._pool, self._budget, self._n_scored = pool, budget, n_scored
        self._feed = Feed()
        self._rows: list[int] = []  # row numbers in the order of the feed
        self._n_done = 0
        self._outcomes: list[Outcome | None] = [None] * n_rows
        self._failure: BaseException | None = None
        # The thread's own state does not tell: a join() that Ctrl-C interrupts marks it as ended.
        self._done = threading.Event()
        self._after = after
        # Daemon thread: a run that fails elsewhere does not wait for scores.
        threading.Thread(target=self._run, name="strop-reward-scoring", daemon=True).start()

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
        """Wait for the end, and ignore errors."""
        self._done.wait()

    def is_done(self) -> bool:
        """Return True if ``outcomes`` will not wait."""
        return self._done.is_set()

    def outcomes(self) -> list[Outcome | None]:
        """Wait for the outcomes, by row; None for rows that were not added. Log progress of a long wait.

        Raises:
            RewardError: more samples failed than the budget allows, with the first traceback.
        """
        started = time.monotonic()
        while not self._done.wait(_LOG_EVERY_S):
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
        finally:
            self._done.set()

    def _score(self) -> None:
        self._budget.begin(self._n_scored)
        errors: list[str] = []  # in the order of the feed

        def name(number: int) -> str:
            return name_row(self.samples, self._rows[number])

        with contextlib.closing(self._pool.evaluate_all(self._feed)) as outcomes:
            for number, outcome in enumerate(outcomes):
                self._outcomes[self._rows[number]] = outcome
                self._n_done = number + 1
                errors.append(outcome.error)
                if self._budget.count(bool(outcome.error)):
                    raise self._budget.exceeded(errors, len(self.samples), name)
        log_first(errors, name)
        self._budget.end(bool(outcome.error) for outcome in self._outcomes if outcome is not None)


class PendingSamples(PendingReward):
    """Rewards of a batch whose samples are added as they are finished, and then completed."""

    def __init__(
        self,
        job: ScoringJob,
        is_scored: Sequence[bool],
        sample: Callable[[PendingSamples, int, list[int]], Sample],
        compose: Callable[..., RewardOutput],
        *,
        waits: bool = False,
    ) -> None:
        """Expect a row for each of ``is_scored``, True where a function scores it.

        ``sample`` makes the scorer's input from this object (to hold it would keep the batch alive until
        Python looks for cycles), a row and its tokens; ``compose`` makes the rewards of batch,
        samples, outcomes and the reward model's scores. With ``waits``, samples are scored once the batch is
        complete.
        """
        self.takes_samples = not waits
        self._job, self._is_scored, self._sample, self._compose = job, list(is_scored), sample, compose
        self._token_ids: list[list[int] | None] = [None] * len(is_scored)
        self._adding = threading.Lock()
        self._batch = DataProto()

    def add(self, row: int, token_ids: list[int]) -> None:
        """Score a finished response, given its tokens. Thread-safe; a row counts once."""
        with self._adding:
            if self._token_ids[row] is not None:
                return
            self._token_ids[row] = token_ids
            make = functools.partial(self._sample, self, row, token_ids)
            if self._is_scored[row]:
                self._job.add(row, make)
            else:
                self._job.samples[row] = make()

    def complete(self, batch: DataProto) -> None:
        """Set the batch, with ``responses`` and ``response_mask`` [B, T], and add its remaining rows.

        Raises ``RewardError`` if a sample was added with other tokens than it has here.
        """
        self._batch = batch
        for row in (lost_in(batch) | scored_by_programs(batch)).nonzero().flatten().tolist():
            self._is_scored[row] = False
        for row, token_ids in enumerate(real_tokens(batch.batch["responses"], batch.batch["response_mask"])):
            self.add(row, token_ids)
            if self._token_ids[row] != token_ids:
                self.cancel()
                raise RewardError(
                    f"sample {row}: the scored tokens {self._token_ids[row]} differ from the generated ones "
                    f"{token_ids}"
                )
        self._job.end()

    def truncated(self, row: int) -> bool | None:
        """Return True if a response ended at the length limit; None before the batch is complete."""
        column = self._batch.batch.get("truncated")
        return None if column is None else bool(column[row])

    def played(self, row: int, tokenizer: Any) -> Played | None:
        """Return the turns of a response of the complete batch; None if samples have no turns."""
        columns = self._batch.batch
        if "ended_by" not in columns:  # without turns, conversation may be a column of the data
            return None
        played = Played.of(
            self._batch.non_tensor_batch["conversation"][row],
            columns["responses"][row],
            columns["response_mask"][row],
            ENDED_BY[int(columns["ended_by"][row])],
            tokenizer,
        )
        # the text of reset, or a program's first request, is in no row of the data
        return played._replace(prompt_ids=ids_of_prompt(self._batch, row))

    def cancel(self) -> None:
        self._job.cancel()

    def is_done(self) -> bool:
        return self._job.is_done()

    def get(self, model_scores: Tensor | None = None) -> RewardOutput:
        """Wait for the rewards; ``model_scores`` [B] are the reward model's. Raises as the manager does."""
        outcomes = self._job.outcomes()
        samples = [sample for sample in self._job.samples if sample is not None]
        return self._compose(self._batch, samples, outcomes, model_scores)
