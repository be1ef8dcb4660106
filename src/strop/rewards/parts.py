"""Parts of a score and their weights: ``reward_model.parts``. B samples."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from strop.algorithms.registry import resolve
from strop.config.reward_parts import KEY, OTHER_SOURCES, REWARD_MODEL, RULE, SCORERS, RewardPart
from strop.errors import RewardError
from strop.protocol import DataProto
from strop.rewards.arguments import Function
from strop.rewards.router import BuiltInScorer, UnknownSourceError

logger = logging.getLogger(__name__)


def part_scorers(parts: Mapping[str, RewardPart]) -> dict[str, Function]:
    """Return the function of every part with a scorer. Raises ``ConfigError`` for wrong names or options."""
    return {name: _scorer(name, part) for name, part in parts.items() if part.scorer is not None}


def _scorer(name: str, part: RewardPart) -> Function:
    key, scorer = f"{KEY}.{name}.scorer", part.scorer
    if callable(scorer):
        return Function(scorer, key, part.kwargs)
    if scorer in SCORERS:
        return Function(BuiltInScorer(scorer, part.kwargs, where=f"{KEY}.{name}.kwargs"), key)
    function = resolve(scorer, dict.fromkeys(SCORERS, BuiltInScorer), key)
    return Function(function, f"{key}={scorer!r}", part.kwargs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Composition:
    """Rules that make a score of parts.

    The score is the weighted sum; with ``non_stop_penalty``, in training, a response cut at the limit, or of
    fewer than ``min_response_length`` tokens, scores ``penalty_reward_value`` instead.

    In validation the score is the rule alone, else the reward model alone, else the weighted sum of the
    others, so that runs with different weights are comparable.
    """

    parts: Mapping[str, RewardPart]
    non_stop_penalty: bool = False
    penalty_reward_value: float = -10.0
    min_response_length: int = 0

    def required(self, data_source: str, *, has_rule: bool) -> tuple[str, ...]:
        """Return the parts that functions compute for a sample."""
        rule = (RULE,) if has_rule and self.parts[RULE].weight(data_source) != 0 else ()
        others = (
            name for name, part in self.parts.items() if part.scorer is not None and part.weight(data_source)
        )
        return (*rule, *others)

    def require_scored(
        self, source: str, *, has_rule: bool, has_reward_model: bool, known: Collection[str]
    ) -> None:
        """Raise ``RewardError`` if nothing scores rows of ``source``; ``known`` are sources with a rule."""
        if has_reward_model and self.parts[REWARD_MODEL].weight(source) != 0:
            return
        if self.parts[RULE].weight(source) != 0 and not has_rule:
            raise UnknownSourceError(source, known)
        if not self.required(source, has_rule=has_rule):
            raise RewardError(
                f"data_source {source!r}: nothing scores it; every part of {KEY} has weight 0 for it"
            )

    def contributions(
        self, parts: Mapping[str, Tensor], sources: Sequence[str], *, failed_B: Tensor, validating: bool
    ) -> dict[str, Tensor]:
        """Return each part's contribution [B]. ``parts`` are NaN where absent; a failed rule has weight 1."""
        added = {}
        decided_B = torch.zeros(len(sources), dtype=torch.bool)
        for name in {RULE, REWARD_MODEL} & parts.keys():
            decided_B |= ~parts[name].isnan()
        for name, values_B in parts.items():
            if name not in self.parts:
                continue  # a number of the scorer for metrics only
            weights_B = torch.tensor([self.parts[name].weight(source) for source in sources])
            if name == RULE:
                weights_B = weights_B.masked_fill(failed_B, 1.0)
            if validating:
                is_judge = float(name in (RULE, REWARD_MODEL))
                weights_B = torch.where(decided_B, is_judge, weights_B)
            if weights_B.any():
                added[name] = values_B.nan_to_num() * weights_B
        return added

    def penalty(self, batch: DataProto, scores_B: Tensor) -> Tensor:
        """Return the difference [B] between non-stop penalty and score; NaN where no penalty is due."""
        columns = batch.batch
        if "truncated" not in columns:
            raise RewardError(
                "reward_model.non_stop_penalty needs the column 'truncated' [B], which is true for responses "
                f"without a stop token; the batch has {sorted(columns)}"
            )
        is_short_B = columns["response_mask"].sum(dim=1).cpu() < self.min_response_length
        due_B = columns["truncated"].cpu().bool() | is_short_B
        return (self.penalty_reward_value - scores_B).masked_fill(~due_B, math.nan)


class UnusedParts:
    """Find weights that never take effect, usually because of a misspelt name; report each once."""

    def __init__(self, parts: Mapping[str, RewardPart]) -> None:
        self._parts = parts
        # Parts that only the reward function can return, beside its score.
        self._awaited = {
            name for name, part in parts.items() if part.scorer is None and name not in (RULE, REWARD_MODEL)
        }
        self._warned: set[tuple[str, str]] = set()

    def warn_of_sources(self, sources: Collection[str], *, known: Collection[str]) -> None:
        """Warn about weights for a data source that is not among ``sources``, the prompts'.

        Skips ``known`` sources: training and validation prompts may have different ones.
        """
        for name, part in self._parts.items():
            for source in part.weights.keys() - {OTHER_SOURCES, *sources, *known}:
                if (name, source) not in self._warned:
                    self._warned.add((name, source))
                    logger.warning(
                        "%s.%s.weight: no prompt has data_source %r (found: %s); is it misspelt?",
                        KEY, name, source, ", ".join(sorted(sources)),
                    )  # fmt: skip

    def require_returned(self, found: Collection[str], sources: Collection[str]) -> None:
        """Raise ``RewardError`` if a part with a weight is not in ``found``, the parts of these scores.

        ``sources`` are the data sources of the samples that the reward function scored. A part is required
        until it appeared once: a function may leave it out for later samples.
        """
        self._awaited -= set(found)
        for name in sorted(self._awaited):
            if any(self._parts[name].weight(source) != 0 for source in sources):
                returned = ", ".join(sorted(set(found) - {RULE, REWARD_MODEL})) or "a score alone"
                raise RewardError(
                    f"{KEY}.{name} has a weight and no scorer, so the reward function must return it; for "
                    f"{len(sources)} samples it returned {returned}. Correct the name, return it (0 where it "
                    "does not apply), set its scorer, or remove it"
                )
