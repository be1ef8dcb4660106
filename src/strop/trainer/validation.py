"""Validation: every prompt of the validation set, answered as ``rollout.val_kwargs`` says, and scored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from strop.algorithms.masked import masked_sum
from strop.protocol import DataProto
from strop.trainer.scores import attach_scores
from strop.trainer.seeds import sample_seeds

if TYPE_CHECKING:
    from strop.trainer.ppo import RayPPOTrainer


def validate(trainer: RayPPOTrainer) -> tuple[dict[str, float], DataProto]:
    """``val/test_score/<data_source>``: the mean score of all responses of a source; and the samples
    themselves.

    The random stream depends on the prompt's batch alone, so every validation of a run draws the same noise.
    """
    n, seed = trainer.config.actor_rollout_ref.rollout.val_kwargs.n, trainer.config.trainer.seed
    scored = []
    for number, prompts in enumerate(trainer.val_loader):
        uids = [f"val-{number}-{row}" for row in range(len(prompts))]
        prompts = prompts.union(DataProto.from_dict(non_tensors={"uid": uids}))
        seeds = sample_seeds(seed, "validation", number, len(prompts), n)
        batch = trainer.generate_with(prompts, seeds, mode="validate")
        scored.append(attach_scores(batch, trainer.val_reward_fn(batch)))
    samples = DataProto.concat(scored)
    scores_B = masked_sum(samples.batch["token_level_scores"], samples.batch["response_mask"], dim=1).numpy()
    sources_B = samples.non_tensor_batch["data_source"]
    metrics = {
        f"val/test_score/{source}": float(np.mean(scores_B[sources_B == source]))
        for source in sorted(set(sources_B))
    }
    return metrics, samples
