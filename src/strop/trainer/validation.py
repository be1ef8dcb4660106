"""Validation: every prompt of the validation set, answered as ``rollout.val_kwargs`` says, and scored."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from strop.algorithms.masked import masked_sum
from strop.errors import RewardError
from strop.protocol import DataProto
from strop.rewards.manager import RewardManager
from strop.trainer.scores import PendingScores
from strop.trainer.seeds import sample_seeds

if TYPE_CHECKING:
    from strop.trainer.ppo import RayPPOTrainer


def validate(trainer: RayPPOTrainer) -> tuple[dict[str, float], DataProto]:
    """``val/test_score/<data_source>``: the mean score of all responses of a source; and the samples
    themselves.

    The random stream depends on the prompt's batch alone, so every validation of a run draws the same noise.
    """
    n, seed = trainer.config.actor_rollout_ref.rollout.val_kwargs.n, trainer.config.trainer.seed
    reward_model = trainer.reward_model if _needs_reward_model(trainer) else None
    scored, waiting = [], None
    for number, prompts in enumerate(trainer.val_loader):
        uids = [f"val-{number}-{row}" for row in range(len(prompts))]
        prompts = prompts.union(DataProto.from_dict(non_tensors={"uid": uids}))
        seeds = sample_seeds(seed, "validation", number, len(prompts), n)
        scores = PendingScores(prompts, n, trainer.val_reward_fn, reward_model)
        with scores.cancelled_on_error():
            scores.complete(trainer.generate_with(prompts, seeds, mode="validate", finished=scores.finished))
        previous, waiting = waiting, scores
        if previous is not None:  # scored while this batch was generated
            scored.append(previous.get())
    if waiting is not None:
        scored.append(waiting.get())
    samples = DataProto.concat(_with_equal_columns(scored))
    scores_B = masked_sum(samples.batch["token_level_scores"], samples.batch["response_mask"], dim=1).numpy()
    sources_B = samples.non_tensor_batch["data_source"]
    metrics = {
        f"val/test_score/{source}": float(np.mean(scores_B[sources_B == source]))
        for source in sorted(set(sources_B))
    }
    return metrics, samples


def _needs_reward_model(trainer: RayPPOTrainer) -> bool:
    """Validation is by rules; only sources that no rule can score are scored by the reward model."""
    if not trainer.use_reward_model or not isinstance(trainer.val_reward_fn, RewardManager):
        return False
    try:
        trainer.val_reward_fn.validate_sources(trainer.val_loader.dataset.data_sources())
    except RewardError:
        return True
    return False


def _with_equal_columns(batches: list[DataProto]) -> list[DataProto]:
    """A part of the score that only some batches have becomes NaN in the others."""
    names = {name for batch in batches for name in batch.batch if name.startswith("reward/")}
    return [
        batch.union(
            DataProto({name: torch.full((len(batch),), math.nan) for name in names - batch.batch.keys()})
        )
        for batch in batches
    ]
