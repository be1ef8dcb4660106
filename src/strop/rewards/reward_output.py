"""The scores of a batch as tensors. B samples, T padded response tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.rewards.records import RULE, Outcome


@dataclass(frozen=True)
class RewardOutput:
    """The scores of a batch, and what they are made of."""

    token_level_scores: Tensor
    """float32 [B, T]: the sample's score at its last response token, 0 elsewhere."""
    parts: dict[str, Tensor]
    """float32 [B] by name: ``rule``, ``reward_model`` (the score is their sum), and what a scorer named
    besides. NaN where a part does not apply to a sample."""
    metrics: dict[str, float]
    """``reward/error_rate``, ``reward/errors``, ``reward/timeouts`` and ``reward/<part>/mean``, the mean over
    the samples that have the part."""
    responses: list[str]
    """The decoded responses [B]."""
    errors: list[str]
    """Why a sample could not be scored [B]; "" for one that could."""


def rule_parts(outcomes: Sequence[Outcome | None], *, error_score: float) -> dict[str, Tensor]:
    """``rule`` and the scorers' own parts [B], NaN for samples without; empty when no sample has an outcome.

    A sample that could not be scored has ``error_score`` and no parts of its own.
    """
    columns: dict[str, list[float]] = {}
    for row, outcome in enumerate(outcomes):
        if outcome is None:
            continue
        rule = error_score if outcome.error else outcome.score
        for name, value in {RULE: rule, **outcome.parts}.items():
            columns.setdefault(name, [math.nan] * len(outcomes))[row] = value
    return {name: torch.tensor(values, dtype=torch.float32) for name, values in columns.items()}


def at_last_token(scores_B: Tensor, mask_BT: Tensor) -> Tensor:
    """Each score at the last position with mask 1, or at position 0 where there is none; float32 [B, T]."""
    positions_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    last_B = (positions_T * mask_BT.bool()).amax(dim=1)
    scores_BT = torch.zeros(mask_BT.shape, dtype=torch.float32, device=mask_BT.device)
    return scores_BT.scatter_(1, last_B[:, None], scores_B.float().to(mask_BT.device)[:, None])


def score_metrics(outcomes: Sequence[Outcome | None], parts: Mapping[str, Tensor]) -> dict[str, float]:
    """The metrics of :class:`RewardOutput`; rates are over the samples that a function was asked to score."""
    asked = [outcome for outcome in outcomes if outcome is not None]
    errors = sum(bool(outcome.error) for outcome in asked)
    return {
        "reward/error_rate": errors / max(len(asked), 1),
        "reward/errors": float(errors),
        "reward/timeouts": float(sum(outcome.status == "timeout" for outcome in asked)),
        **{f"reward/{name}/mean": values.nanmean().item() for name, values in parts.items()},
    }
