"""From parts to a score. B samples, T response tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from strop.algorithms.registry import resolve
from strop.config.reward_parts import KEY, REWARD_MODEL, RULE, SCORERS, RewardPart
from strop.rewards.coverage import asked_parts
from strop.rewards.custom import require_score_signature
from strop.rewards.part_scorers import BuiltInScorer, OwnScorer
from strop.rewards.records import ScoreFunction


def part_scorers(parts: Mapping[str, RewardPart]) -> dict[str, ScoreFunction]:
    """The function of every part that has one; ``ConfigError`` where there is none, or wrong options."""
    return {name: _scorer(name, part) for name, part in parts.items() if part.scorer is not None}


def _scorer(name: str, part: RewardPart) -> ScoreFunction:
    key, scorer = f"{KEY}.{name}.scorer", part.scorer or ""
    if scorer in SCORERS:
        return BuiltInScorer(scorer, part.kwargs, where=f"{KEY}.{name}.kwargs")
    function = resolve(scorer, dict.fromkeys(SCORERS, BuiltInScorer), key)
    require_score_signature(function, f"{key}={scorer!r}", **part.kwargs)
    return OwnScorer(function, part.kwargs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Composition:
    """How parts become a score.

    The weighted sum; then, with ``non_stop_penalty``, a response that did not end by its stop token, or that
    ended before ``min_response_length`` tokens, has ``penalty_reward_value`` instead.

    Validation is by the rule alone, else by the reward model alone, else by the weighted sum of the others:
    figures of runs with other weights compare.
    """

    parts: Mapping[str, RewardPart]
    non_stop_penalty: bool = False
    penalty_reward_value: float = -10.0
    min_response_length: int = 0

    def asked(self, data_source: str, *, has_rule: bool) -> tuple[str, ...]:
        """The parts of a sample that functions give."""
        return asked_parts(self.parts, data_source, has_rule=has_rule)

    def contributions(
        self, parts: Mapping[str, Tensor], sources: Sequence[str], *, failed_B: Tensor, validating: bool
    ) -> dict[str, Tensor]:
        """What each part [B] (NaN: not there) adds to the score [B]; a failed rule counts in full."""
        added = {}
        decided_B = torch.zeros(len(sources), dtype=torch.bool)
        for name in {RULE, REWARD_MODEL} & parts.keys():
            decided_B |= ~parts[name].isnan()
        for name, values_B in parts.items():
            if name not in self.parts:
                continue  # a number beside the score, for the eye
            weights_B = torch.tensor([self.parts[name].weight(source) for source in sources])
            if name == RULE:
                weights_B = weights_B.masked_fill(failed_B, 1.0)
            if validating:
                is_judge = float(name in (RULE, REWARD_MODEL))
                weights_B = torch.where(decided_B, is_judge, weights_B)
            if weights_B.any():
                added[name] = values_B.nan_to_num() * weights_B
        return added

    def penalty(self, scores_B: Tensor, truncated_B: Tensor, lengths_B: Tensor) -> Tensor:
        """What takes a score [B] to the penalty; NaN where none is due."""
        due_B = truncated_B.bool() | (lengths_B < self.min_response_length)
        return (self.penalty_reward_value - scores_B).masked_fill(~due_B, torch.nan)
