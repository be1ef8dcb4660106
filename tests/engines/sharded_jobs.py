"""What the ranks do in the tests of sharded engines: functions that a spawned process can import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from strop.config.load import load_config
from strop.engines.micro_batches import MicroBatching
from strop.engines.settings import OptimizerSettings, ShardingSettings
from strop.engines.torch.engine import TorchEngine
from strop.models.deferred import defer_causal_lm, defer_scorer
from strop.models.loader import load_causal_lm, load_scorer
from strop.models.policy import PolicyModel
from strop.models.scorer import ValueModel
from strop.protocol import DataProto
from strop.workers.losses import actor_objective, critic_objective

from builders import random_samples

SETTINGS = OptimizerSettings(betas=(0.9, 0.999), weight_decay=0.01, eps=1e-8, grad_clip=1.0)
STEPS = 4
Weights = dict[str, torch.Tensor]


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def engine(folder: Path, role: str = "actor", *, sharding: dict[str, Any] | None = None, **options: Any):
    """The engine of a role: sharded when there is a process group."""
    options = {"device": torch.device("cpu"), "optimizer": SETTINGS, **options}
    wrapper = PolicyModel if role == "actor" else ValueModel
    if world_size() == 1:
        model = load_causal_lm(folder) if role == "actor" else load_scorer(folder, fresh_head_seed=1)
        return TorchEngine(wrapper(model), **options)
    deferred = defer_causal_lm(folder) if role == "actor" else defer_scorer(folder, fresh_head_seed=1)
    return TorchEngine(
        wrapper(deferred[0]), sharding=ShardingSettings(**sharding or {}), weights=deferred[1], **options
    )


def samples(n_rows: int = 16, seed: int = 0) -> DataProto:
    """A mini-batch with every column that the objectives read."""
    found = random_samples(n_rows, seed=seed)
    generator = torch.Generator().manual_seed(5 + seed)
    mask = found.batch["response_mask"]
    for name, scale in (("advantages", 1.0), ("old_log_probs", 0.3), ("values", 0.3), ("returns", 1.0)):
        found.batch[name] = scale * torch.randn(mask.shape, generator=generator) * mask
    found.batch["old_log_probs"] -= 2.5 * mask
    found.batch["ref_log_prob"] = found.batch["old_log_probs"] - 0.1
    return found


def mine(batch: DataProto) -> DataProto:
    """This rank's rows; padded, as a controller does, with a row that has nothing to learn from."""
    missing = -len(batch) % world_size()
    if missing:
        padding = batch[torch.zeros(missing, dtype=torch.long)]
        padding.batch["response_mask"] = torch.zeros_like(padding.batch["response_mask"])
        batch = DataProto(
            {name: torch.cat([column, padding.batch[name]]) for name, column in batch.batch.items()}
        )
    return batch[torch.arange(rank(), len(batch), world_size())]


def objective(role: str, batch: DataProto, mode: str = "token-mean"):
    """The loss of a role with the denominators of the whole mini-batch."""
    config = load_config(
        [
            f"actor_rollout_ref.actor.loss_agg_mode={mode}",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.actor.entropy_coeff=0.01",
            f"critic.loss_agg_mode={mode}",
        ]
    )
    counts = {
        "n_tokens": float(batch.batch["response_mask"].sum()),
        "n_seqs": float(len(batch)),
        "max_response_length": 5,
    }
    if role == "actor":
        return actor_objective(config.actor_rollout_ref.actor, **counts)
    return critic_objective(config.critic, **counts)


def step(
    trained: TorchEngine, role: str, micro: MicroBatching, *, seed: int, rows: int = 16, mode="token-mean"
):
    """One update on this rank's rows of a mini-batch."""
    batch = samples(rows, seed)
    options = {"temperature": 0.9} if role == "actor" else {}
    metrics = trained.forward_backward(mine(batch), objective(role, batch, mode), micro, **options)
    return metrics, trained.optimizer_step(0.01)


def weights(trained: TorchEngine) -> Weights:
    return {name: weight.clone() for name, weight in trained.named_weights()}


def train(
    folder: Path, role: str, micro: MicroBatching, step_options: dict[str, Any], options: dict[str, Any]
):
    """Some updates; (weights, gradient norms, metrics of the last step) of this rank."""
    trained = engine(folder, role, **options)
    norms, metrics = [], {}
    for seed in range(STEPS):
        metrics, result = step(trained, role, micro, seed=seed, **step_options)
        norms.append(result.grad_norm)
    return weights(trained), norms, metrics
