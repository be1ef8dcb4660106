"""Scoring the samples of a batch in the background, up to the point where too many have failed."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Mapping

from strop.errors import RewardError
from strop.rewards.error_budget import ErrorBudget
from strop.rewards.feed import Feed, Maker
from strop.rewards.pool import RewardPool
from strop.rewards.process import RewardProcess
from strop.rewards.records import Outcome, Sample

logger = logging.getLogger(__name__)

_SHOWN_CHARACTERS = 200
_TELL_EVERY_S = 10.0


class ScoringJob:
    """The samples of one batch of B rows, scored in a thread of their own in the order in which they come.

    One job after another has the process (or the pool of them): ``after`` is the one before. ``outcomes``
    waits for the end.
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
        """``n_scored`` of the ``n_rows`` rows of the batch will be added."""
        self.samples: list[Sample | None] = [None] * n_rows
        """By row; None for those that were not added."""
        self._process, self._budget, self._n_scored = process, budget, n_scored
        self._feed = Feed()
        self._rows: list[int] = []  # in the order of the feed
        self._n_done = 0
        self._outcomes: list[Outcome | None] = [None] * n_rows
        self._failure: BaseException | None = None
        self._after = after
        # A daemon: a run that ends for another reason does not wait for scores.
        self._thread = threading.Thread(target=self._run, name="strop-reward-scoring", daemon=True)
        self._thread.start()

    def add(self, row: int, make: Maker) -> None:
        """Score a row too; ``make`` is called in another thread. Not for several threads at once."""

        def sample() -> Sample:
            made = self.samples[row] = make()
            return made

        self._rows.append(row)
        self._feed.add(sample)

    def end(self) -> None:
        """All are added."""
        self._feed.end()

    def cancel(self, *, with_earlier: bool = False) -> None:
        """Nobody will ask for the outcomes; soon afterwards the process is idle or gone."""
        self._feed.cancel()
        if with_earlier and (before := self._after) is not None:
            before.cancel(with_earlier=True)

    def wait(self) -> None:
        """Until the thread is done, whatever came of it."""
        self._thread.join()

    def outcomes(self) -> list[Outcome | None]:
        """What became of every sample, by row; None for rows that were not added.

        A long wait is logged, with how far the job has come.

        Raises:
            RewardError: a score (or a part of it) that is NaN or infinite, naming the sample; or more failed
                samples than the budget bears, with the first traceback.
        """
        self._wait_and_tell()
        if self._failure is not None:
            raise self._failure
        return self._outcomes

    def _wait_and_tell(self) -> None:
        """Lines of the log and no progress bar: during a run the terminal has the table of the run."""
        started = time.monotonic()
        while self._thread.is_alive():
            self._thread.join(_TELL_EVERY_S)
            if self._thread.is_alive():
                logger.info(
                    "scoring: %d of %d samples are done; waited for %.0f s",
                    self._n_done,
                    self._n_scored,
                    time.monotonic() - started,
                )

    def _run(self) -> None:
        if self._after is not None:
            self._after.wait()
            self._after = None  # or all jobs of a run would be kept
        try:
            self._score()
        # Raised again where the outcomes are asked for, in the thread of the run.
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
                _require_finite(outcome, name)
                self._outcomes[row] = outcome
                self._n_done = number + 1
                if outcome.error:
                    failed += 1
                    if failed == 1:
                        first_error = f"{name}:\n{outcome.error}"
                        logger.warning("could not score %s", first_error)
                if self._budget.count(bool(outcome.error)):
                    raise RewardError(
                        f"too many samples cannot be scored: {failed} of the first {number + 1} of this "
                        f"batch of {len(self.samples)} "
                        f"(reward_model.max_error_rate={self._budget.max_rate:g}). "
                        f"The first was {first_error}"
                    )
        self._budget.end(bool(outcome.error) for outcome in self._outcomes if outcome is not None)


def name_sample(row: int, sample: Sample) -> str:
    """A sample in the words of an error text."""
    index = sample.extra_info.get("index") if isinstance(sample.extra_info, Mapping) else None
    known = "" if index is None else f", extra_info.index={index}"
    text = sample.solution_str
    shown = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
    return f"sample {row} (data_source={sample.data_source!r}{known}, response={shown!r})"


def _require_finite(outcome: Outcome, name: str) -> None:
    found = {"score": outcome.score, **outcome.parts}
    bad = ", ".join(f"{part}={value}" for part, value in found.items() if not math.isfinite(value))
    if bad:
        raise RewardError(f"the reward function returned {bad} for {name}")
