"""Functions that ranks run in the tests of workers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sharded_jobs
import torch
import torch.distributed as dist
from huggingface_hub import constants
from sharded_jobs import mine, rank, world_size

from strop.checkpoint.folder import seal
from strop.config.load import load_config
from strop.config.schema import Config
from strop.controller.pools import Role
from strop.models import deferred
from strop.protocol import DataProto
from strop.workers.critic import CriticWorker
from strop.workers.policy import ActorRolloutRefWorker

from builders import random_samples

Weights = dict[str, torch.Tensor]


def config_of(folder: Path, *extra: str) -> Config:
    return load_config(
        [
            f"actor_rollout_ref.model.path={folder}",
            f"critic.model.path={folder}",
            "data.train_files=unused",
            "data.val_files=unused",
            "data.max_prompt_length=6",
            "data.max_response_length=5",
            "actor_rollout_ref.rollout.name=hf",
            "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "critic.optim.lr=1e-3",
            "trainer.device=cpu",
            *extra,
        ]
    )


def worker(folder: Path, role: Role, *extra: str) -> Any:
    """A worker of this rank, with its model."""
    worker_cls = CriticWorker if role is Role.Critic else ActorRolloutRefWorker
    built = worker_cls(config_of(folder, *extra), role, rank=rank(), world_size=world_size())
    built.init_model()
    return built


def mini_batch() -> DataProto:
    """All rows of a mini-batch, with the facts that the trainer attaches."""
    batch = sharded_jobs.samples()
    facts = {"iteration": 0, "total_iterations": 10, "first_update": 0, "n_seqs": 16.0}
    batch.meta_info.update(facts, n_tokens=float(batch.batch["response_mask"].sum()))
    return batch


def update(built: Any, times: int = 2) -> dict[str, float]:
    """Updates on this rank's rows."""
    whole = mini_batch()
    rows = DataProto(mine(whole).batch, {}, whole.meta_info)
    method = built.update_critic if built.role is Role.Critic else built.update_actor
    return [method(rows) for _ in range(times)][-1]


def prompts(mode: str = "train", n: int = 2) -> DataProto:
    """This rank's prompts, with the seeds of all samples fixed before they were spread."""
    columns = random_samples(8).batch
    width = columns["prompts"].shape[1]
    chosen = {name: columns[name][:, :width] for name in ("input_ids", "attention_mask", "position_ids")}
    batch = DataProto({**chosen, "seeds": torch.arange(8 * n).view(8, n) + 100})
    rows = torch.arange(rank(), 8, world_size())
    return DataProto(batch[rows].batch, {}, {"mode": mode})


def generate(folder: Path, role: Role, mode: str, *extra: str) -> dict[str, torch.Tensor]:
    """Samples after some updates, by prompt: the shape is [prompts, n, ...]."""
    built = worker(folder, role, *extra)
    built.sync_rollout(0)
    first = built.generate_sequences(prompts(mode))
    built.release_rollout()
    update(built)
    built.sync_rollout(1)
    built.verify_rollout(1)
    found = built.generate_sequences(prompts(mode))
    again = built.generate_sequences(prompts(mode))
    built.release_rollout()
    assert all(torch.equal(found.batch[name], again.batch[name]) for name in found.batch)
    moved = (found.batch["rollout_log_probs"] - first.batch["rollout_log_probs"]).abs().max()
    assert moved > 1e-4  # the current weights are used, not those of the start
    assert built.world_size == 1 or next(built.rollout.model.parameters()).is_meta  # memory given back
    return {name: column.view(len(prompts()), -1, *column.shape[1:]) for name, column in found.batch.items()}


def buckets(folder: Path, max_bytes: int) -> tuple[list[Sequence[tuple[str, torch.Tensor]] | None], str]:
    """Everything that ``weight_bucket`` hands out on this rank until rank zero has None; the actor's hash."""
    built = worker(folder, Role.Actor)
    update(built)
    handed = [built.weight_bucket(True, max_bytes)]  # abandoned, to start again
    handed = [built.weight_bucket(True, max_bytes)]
    more = torch.tensor(1)
    while True:
        more.fill_(int(handed[-1] is not None))
        if dist.is_initialized():
            dist.broadcast(more, src=0)
        if not more:
            return handed, built.weights_hash()
        handed.append(built.weight_bucket(False, max_bytes))


def loaded(folder: Path, handed: list[Any]) -> Any:
    """A rollout in a separate pool that took over these buckets."""
    built = worker(folder, Role.Rollout)
    for bucket in handed:
        built.load_weights(bucket)
    return built


def generate_with(folder: Path, handed: list[Any]) -> dict[str, torch.Tensor]:
    found = loaded(folder, handed).generate_sequences(prompts())
    return {name: column.view(len(prompts()), -1, *column.shape[1:]) for name, column in found.batch.items()}


def update_and_hash(folder: Path, role: Role, *extra: str) -> tuple[dict[str, float], Weights]:
    built = worker(folder, role, *extra)
    metrics = update(built)
    return metrics, {name: weight.clone() for name, weight in built.engine.named_weights()}


def load_flipped(folder: Path, out: Path) -> str:
    """The error of loading a checkpoint in which a bit of the second rank's file changed."""
    built = worker(folder, Role.Critic)
    built.save_checkpoint(out / "critic")
    dist.barrier()
    if rank() == 0:
        seal(out)
        shard = out / "critic" / "__1_0.distcp"
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    dist.barrier()
    return sharded_jobs.failure(built.load_checkpoint, out / "critic")


def on_policy(folder: Path, apart: bool, *extra: str) -> tuple[dict[str, torch.Tensor], Any, Weights]:
    """This rank's old log-probs and entropies, metrics and weights of one step on 15 samples."""
    built = worker(folder, Role.Actor, *extra)
    whole = sharded_jobs.samples(15)
    del whole.batch["old_log_probs"]
    facts = {"iteration": 0, "total_iterations": 10, "first_update": 0, "n_seqs": 15.0}
    facts["n_tokens"] = float(whole.batch["response_mask"].sum())
    rows = DataProto(mine(whole).batch, {}, facts)
    if apart:
        columns = built.compute_log_prob(rows).batch
        metrics = built.update_actor(rows.union(DataProto({"old_log_probs": columns["old_log_probs"]})))
    else:
        updated = built.update_actor_on_policy(rows)
        columns, metrics = updated.batch, updated.meta_info["metrics"]
    return columns, metrics, {name: weight.clone() for name, weight in built.engine.named_weights()}


def load_from_hub(cache: Path, name: str, out: Path) -> dict[str, Any]:
    """A worker of a model in ``cache``: the ids that end its answers; ``out`` gets its export."""

    def read_whole(*_: Any, **__: Any) -> None:
        raise AssertionError("a sharded model is read tensor by tensor")

    constants.HF_HUB_CACHE = str(cache)
    deferred.load_causal_lm = read_whole
    built = worker(name, Role.ActorRollout, f"data.cache_dir={out / 'strop'}")
    weights = built.weights_hash()
    built.export(out / "exported", 1)
    rollout = built.rollout
    return {"ends": rollout.eos_token_ids, "weights": weights}


def load_from_caches(caches: list[Path], name: str, out: Path) -> None:
    """Build a worker on a rank whose cache is ``caches[rank]``."""
    constants.HF_HUB_CACHE = str(caches[rank()])
    worker(name, Role.ActorRollout, f"data.cache_dir={out / 'strop'}")
