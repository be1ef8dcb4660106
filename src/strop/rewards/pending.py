"""The rewards of a batch that is being scored, or even generated. B samples, T padded response tokens."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from strop.config.reward_parts import NON_STOP_PENALTY, REWARD_MODEL, RULE
from strop.errors import RewardError
from strop.protocol import DataProto
from strop.rewards.records import Outcome, Sample
from strop.rewards.reward_output import RewardOutput, at_last_token, rule_parts, score_metrics
from strop.rewards.scoring import ScoringJob, name_sample

if TYPE_CHECKING:
    from strop.rewards.manager import RewardManager

Fields = tuple[str, Any, Any]
"""What the data say of a row: data source, ground truth, extra info."""
Parts = tuple[str, ...]


class PendingRewards:
    """Takes the samples of a batch as they are finished, then the batch itself, and gives its rewards."""

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
