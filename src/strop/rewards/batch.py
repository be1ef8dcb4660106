"""The rewards of a batch that is being scored, or even generated. B samples, T padded response tokens."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from strop.config.reward_parts import NON_STOP_PENALTY, REWARD_MODEL, RULE
from strop.errors import RewardError
from strop.protocol import DataProto
from strop.rewards.base import PendingReward
from strop.rewards.reward_output import RewardOutput, at_last_token, rule_parts, score_metrics
from strop.rewards.worker.feed import Feed, Maker
from strop.rewards.worker.pool import RewardPool
from strop.rewards.worker.process import RewardProcess
from strop.rewards.worker.records import Outcome, Sample

if TYPE_CHECKING:
    from strop.rewards.manager import RewardManager


# How many samples may fail before a run must stop.

WINDOW = 256


class ErrorBudget:
    """Counts failed samples over the present batch and the ones before it, 256 samples in all.

    A batch larger than that is judged alone. The window keeps small batches fair: one failed sample of four
    is a quarter, and yet no reason to stop. So one failure is always borne, unless ``max_rate`` is 0.
    """

    def __init__(self, max_rate: float) -> None:
        self.max_rate = max_rate
        self._before: deque[bool] = deque(maxlen=WINDOW)
        self._allowed = math.inf
        self._failed = 0

    def begin(self, samples: int) -> None:
        """A batch of so many samples comes next."""
        kept = list(self._before)[-(WINDOW - samples) :] if samples < WINDOW else []
        self._failed = sum(kept)
        allowed = self.max_rate * (len(kept) + samples)
        self._allowed = max(allowed, 1.0) if self.max_rate > 0 else 0.0

    def count(self, failed: bool) -> bool:
        """Count one sample; whether there are now too many failures, however the rest of the batch ends."""
        self._failed += failed
        return self._failed > self._allowed

    def end(self, failed: Iterable[bool]) -> None:
        """The batch is done; its samples by row, in whichever order they were counted."""
        self._before.extend(failed)


# Scoring the samples of a batch in the background, up to the point where too many have failed.

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


Fields = tuple[str, Any, Any]


"""What the data say of a row: data source, ground truth, extra info."""


Parts = tuple[str, ...]


class PendingRewards(PendingReward):
    """Takes the samples of a batch as they are finished, then the batch itself, and gives its rewards."""

    takes_samples = True

    def __init__(
        self, manager: RewardManager, job: ScoringJob, fields: Sequence[Fields], asked: Sequence[Parts]
    ) -> None:
        """``fields`` and ``asked`` (the parts that functions give) of all B rows."""
        self._manager, self._job, self._fields, self._asked = manager, job, fields, asked
        self._has_rule = [RULE in parts for parts in asked]
        self._token_ids: list[list[int] | None] = [None] * len(fields)
        self._adding = threading.Lock()
        self._batch = DataProto()

    def add(self, row: int, token_ids: list[int]) -> None:
        """A response of the batch to come is finished: these are its tokens. From any thread."""
        with self._adding:
            if self._token_ids[row] is not None:
                return
            self._token_ids[row] = token_ids
            asked = self._asked[row]
            make = functools.partial(self._manager.sample, self._fields[row], token_ids, asked)
            if asked:
                self._job.add(row, make)
            else:
                self._job.samples[row] = make()

    def complete(self, batch: DataProto) -> None:
        """The whole batch, with ``responses`` and ``response_mask`` [B, T]; the rest of it is added.

        Raises ``RewardError`` when a sample was added with other tokens than it has here.
        """
        for row, token_ids in enumerate(real_tokens(batch.batch["responses"], batch.batch["response_mask"])):
            self.add(row, token_ids)
            if self._token_ids[row] != token_ids:
                self.cancel()
                raise RewardError(
                    f"sample {row} was scored with other tokens than were generated: "
                    f"{self._token_ids[row]}, not {token_ids}"
                )
        self._batch = batch
        self._job.end()

    def cancel(self) -> None:
        """Nobody will ask for them."""
        self._job.cancel()

    def get(self, model_scores: Tensor | None = None) -> RewardOutput:
        """Wait for them; ``model_scores`` [B] of the reward model are added. Raises as the manager does."""
        outcomes = self._job.outcomes()
        samples = [sample for sample in self._job.samples if sample is not None]
        parts = rule_parts(outcomes, self._has_rule, error_score=self._manager.error_score)
        if model_scores is not None:
            parts[REWARD_MODEL] = self._model_part(samples, model_scores)
        sources = [sample.data_source for sample in samples]
        self._manager.unused_parts.require_returned(parts, self._sources_scored(sources, outcomes))
        failed_B = torch.tensor([outcome is not None and bool(outcome.error) for outcome in outcomes])
        added = self._manager.composition.contributions(
            parts, sources, failed_B=failed_B, validating=self._validating
        )
        scores_B = sum(added.values(), torch.zeros(len(samples)))
        if (penalty_B := self._penalty(scores_B)) is not None:
            parts[NON_STOP_PENALTY] = penalty_B
            added[NON_STOP_PENALTY] = penalty_B.nan_to_num()
            scores_B = scores_B + added[NON_STOP_PENALTY]
        self._manager.examine(self._batch, samples, scores_B, parts, outcomes)
        return RewardOutput(
            token_level_scores=at_last_token(scores_B, self._batch.batch["response_mask"]),
            parts=parts,
            metrics=score_metrics(outcomes, sources, parts, added),
            responses=[sample.solution_str for sample in samples],
            errors=["" if outcome is None else outcome.error for outcome in outcomes],
        )

    def _sources_scored(self, sources: Sequence[str], outcomes: Sequence[Outcome | None]) -> list[str]:
        """The data source of each sample for which the reward function returned something."""
        return [
            source
            for source, outcome, has_rule in zip(sources, outcomes, self._has_rule, strict=True)
            if has_rule and outcome is not None and not outcome.error
        ]

    @property
    def _validating(self) -> bool:
        return self._batch.meta_info.get("mode") == "validate"

    def _penalty(self, scores_B: Tensor) -> Tensor | None:
        """As ``Composition.penalty``; none in validation."""
        composition, columns = self._manager.composition, self._batch.batch
        if not composition.non_stop_penalty or self._validating:
            return None
        if "truncated" not in columns:
            raise RewardError(
                "reward_model.non_stop_penalty: the batch has no column 'truncated' [B], which tells whether "
                f"a response ended by its stop token; it has {sorted(columns)}"
            )
        lengths_B = columns["response_mask"].sum(dim=1).cpu()
        return composition.penalty(scores_B, columns["truncated"].cpu(), lengths_B)

    def _model_part(self, samples: Sequence[Sample], scores: Tensor) -> Tensor:
        scores_B = scores.detach().float().cpu().reshape(len(samples))
        for row in (~torch.isfinite(scores_B)).nonzero().flatten().tolist():
            raise RewardError(
                f"the reward model gave {scores_B[row].item()} for {name_sample(row, samples[row])}"
            )
        if self._validating:  # by rules alone, where there is one
            scores_B = scores_B.masked_fill(torch.tensor(self._has_rule), math.nan)
        return scores_B


def real_tokens(ids_BT: Tensor, mask_BT: Tensor) -> list[list[int]]:
    """The token ids of each row where the mask is 1."""
    rows = zip(ids_BT.cpu(), mask_BT.cpu().bool(), strict=True)
    return [ids_T[mask_T].tolist() for ids_T, mask_T in rows]
