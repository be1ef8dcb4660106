"""Jobs of ranks in the tests of layouts and sequence parallelism, importable in a spawned process."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import families
import pytest
import sharded_jobs
import torch
import worker_jobs
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from strop.config.load import load_config
from strop.controller.pools import Role
from strop.controller.shards import shard
from strop.engines.micro_batches import MicroBatching
from strop.engines.torch.sharding import whole
from strop.models import attention
from strop.protocol import DataProto
from strop.workers.reward_model import RewardModelWorker

import tiny_model

Lengths = list[tuple[int, int]]
"""(prompt, response) of each row; a response of 0 is a row without anything to learn from."""
KEYS = {
    Role.Actor: "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    Role.RefPolicy: "actor_rollout_ref.ref.ulysses_sequence_parallel_size",
    Role.Critic: "critic.ulysses_sequence_parallel_size",
    Role.RewardModel: "reward_model.ulysses_sequence_parallel_size",
}
UPDATES = {Role.Actor: "update_actor", Role.Critic: "update_critic"}


ONE_KV_HEAD = {"num_key_value_heads": 1, "tie_word_embeddings": True}
PADDED = ("actor_rollout_ref.model.use_remove_padding=false",)
PACKED = ("actor_rollout_ref.model.use_remove_padding=true",)  # the critic's follows it
CHECKPOINTING = (
    "actor_rollout_ref.model.enable_gradient_checkpointing=true",
    "critic.model.enable_gradient_checkpointing=true",
)


def sharing(size: int) -> tuple[str, ...]:
    """Return the keys with which ``size`` ranks share sequences in every role."""
    return *PACKED, *(f"{key}={size}" for key in KEYS.values())


def save_model(folder: Path, family: str, **sizes: Any) -> Path:
    """Save a random model of that family with the tiny tokenizer; return ``folder``."""
    families.model(family, **sizes).save_pretrained(folder)
    tiny_model.build_tokenizer().save_pretrained(folder)
    return folder


def samples(lengths: Lengths) -> DataProto:
    """Return a mini-batch of these lengths with every column that the objectives read."""
    columns = families.rows(*lengths)
    response_mask, generator = columns["response_mask"], torch.Generator().manual_seed(len(lengths))
    for name in ("advantages", "old_log_probs", "values", "returns"):
        columns[name] = 0.3 * torch.randn(response_mask.shape, generator=generator) * response_mask
    columns["old_log_probs"] -= 2.5 * response_mask
    columns["ref_log_prob"] = columns["old_log_probs"] - 0.1
    columns["returns"] += 2 * response_mask  # away from the values: what is left of 1 - 0.99 is rounding
    return DataProto(columns)


def flat(gradient: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([weight.double().flatten() for weight in gradient.values()])


def require_equal_gradients(
    ranks: Any,
    folder: Path,
    role: Role,
    batches: list[Lengths],
    layouts: dict[str, tuple[int, MicroBatching, tuple[str, ...]]],
    mode: str = "token-mean",
) -> None:
    """Compare layouts (ranks, micro-batches, keys) with one rank, padded, in one micro-batch."""
    [expected] = ranks.run(1, gradients, folder, role, batches, MicroBatching(rows=8), mode, *PADDED)
    for layout, (size, micro, keys) in layouts.items():
        for found in ranks.run(size, gradients, folder, role, batches, micro, mode, *keys):
            for lengths, ours, theirs in zip(batches, found, expected, strict=True):
                (gradient, metrics), (their_gradient, their_metrics) = ours, theirs
                assert list(gradient) == list(their_gradient)
                a, b = flat(gradient), flat(their_gradient)
                assert (a - b).norm() <= 1e-6 * b.norm(), (layout, lengths)
                assert metrics == pytest.approx(their_metrics, rel=1e-4, abs=1e-6), (layout, lengths)


def _mine(built: Any, method: str, batch: DataProto) -> DataProto:
    part, parts = built.data_parallel_place(method)
    return shard(batch, parts).parts[part]


def gradients(
    folder: Path, role: Role, batches: list[Lengths], micro: MicroBatching, mode: str, *keys: str
) -> list[tuple[dict[str, torch.Tensor], dict[str, float]]]:
    """Return the whole gradient of each mini-batch, with its norm as ``norm``, and the metrics."""
    built = worker_jobs.worker(folder, role, *keys)
    name, options = ("critic", {}) if role is Role.Critic else ("actor", {"temperature": 0.9})
    results = []
    for batch in map(samples, batches):
        objective = sharded_jobs.objective(name, batch, mode)
        rows = _mine(built, UPDATES[role], batch)
        metrics = built.engine.forward_backward(rows, objective, micro, **options)
        weights = built.engine.module.named_parameters()
        found = {name: whole(weight.grad).clone() for name, weight in weights}
        found["norm"] = torch.tensor(built.engine.optimizer_step(0.0).grad_norm)
        results.append((found, metrics))
    return results


def _rewarder(folder: Path, *keys: str) -> RewardModelWorker:
    base = ("data.train_files=unused", "data.val_files=unused", "trainer.device=cpu")
    paths = (f"actor_rollout_ref.model.path={folder}", f"reward_model.model.path={folder}")
    own = ("reward_model.model.input_tokenizer=null", "reward_model.micro_batch_size_per_gpu=3")
    config = load_config([*base, *paths, *own, *keys])
    rank, world_size = sharded_jobs.rank(), sharded_jobs.world_size()
    built = RewardModelWorker(config, Role.RewardModel, rank=rank, world_size=world_size)
    built.init_model()
    return built


def outputs(
    folder: Path, scorer: Path, lengths: Lengths, *keys: str
) -> list[tuple[tuple[int, int], DataProto]]:
    """Return, by method, this rank's place among the parts of the rows, and its results."""
    kl = ("algorithm.kl_penalty=full", "algorithm.kl_ctrl.kl_coef=0.1")
    batch, results = samples(lengths), []
    actor = worker_jobs.worker(folder, Role.ActorRolloutRef, *keys, *kl)
    critic, rewarder = worker_jobs.worker(folder, Role.Critic, *keys), _rewarder(scorer, *keys)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(*batch.batch["responses"].shape, 32, generator=generator)
    for built, method, rows in (
        (actor, "compute_ref_log_prob", batch),
        (actor, "compute_log_prob", batch.union(DataProto({"ref_hidden": hidden}))),
        (critic, "compute_values", batch),
        (rewarder, "compute_rm_score", batch),
    ):
        found = getattr(built, method)(_mine(built, method, rows))
        results.append((built.data_parallel_place(method), found))
    return results


def lengths_in_layers(folder: Path, lengths: Lengths, *keys: str) -> list[tuple[str, int]]:
    """Return the type of each feed-forward layer and the number of tokens that it gets on this rank."""
    seen = []

    def note(module, inputs):
        seen.append((type(module).__name__, inputs[0].shape[1]))

    built = worker_jobs.worker(folder, Role.Actor, *keys)
    for module in built.engine.module.modules():
        if type(module).__name__.endswith("MLP"):
            module.register_forward_pre_hook(note)
    built.compute_log_prob(samples(lengths))
    return seen


def with_flash_attention(folder: Path, lengths: Lengths, *keys: str) -> tuple[torch.Tensor, set[Any]]:
    """Return log-probs by a stand-in for flash-attention, whose kernel needs a GPU, and its arguments."""
    calls = set()

    def varlen(module, query, key, value, attention_mask, **options):
        ends = options["cu_seq_lens_q"].tolist()
        calls.add((module.config._attn_implementation, query.shape[1], key.shape[1], query.shape[2], *ends))
        return families.flash_attention(module, query, key, value, attention_mask, **options)

    built = worker_jobs.worker(folder, Role.Actor, *keys)
    model = built.engine.module.hugging_face_model
    attention = ALL_ATTENTION_FUNCTIONS._global_mapping
    before = attention.get("flash_attention_2")
    model.config._attn_implementation, attention["flash_attention_2"] = "flash_attention_2", varlen
    try:
        found = built.compute_log_prob(samples(lengths)).batch["old_log_probs"]
    finally:
        attention["flash_attention_2"] = before
    assert model.config._attn_implementation == "flash_attention_2"
    return found, calls


def with_varlen_attention(
    folder: Path, lengths: Lengths, *keys: str
) -> tuple[torch.Tensor, list[tuple[Any, ...]]]:
    """Return log-probs by a stand-in for torch's attention by lengths, which needs a GPU, and its calls."""
    calls = []

    @functools.wraps(families.varlen_attn)
    def counted(query, key, value, ends, *arguments, **options):
        calls.append((*map(tuple, (query.shape, key.shape)), options["window_size"][0], ends.tolist()))
        return families.varlen_attn(query, key, value, ends, *arguments, **options)

    built = worker_jobs.worker(folder, Role.Actor, *keys)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "takes_lengths", lambda query, value: True)
        patch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=counted))
        found = built.compute_log_prob(samples(lengths)).batch["old_log_probs"]
    return found, calls


def log_probs_by(attention: str, folder: Path, lengths: Lengths, *keys: str) -> torch.Tensor:
    """Return log-probs by an attention back-end of packed rows."""
    built = worker_jobs.worker(folder, Role.Actor, *keys)
    built.engine.module.hugging_face_model.config._attn_implementation = attention
    return built.compute_log_prob(samples(lengths)).batch["old_log_probs"]


def refusal(folder: Path, role: Role, *keys: str) -> str:
    """Return the error of building a worker with these keys."""
    try:
        worker_jobs.worker(folder, role, *keys)
    except Exception as error:  # noqa: BLE001 - whatever it is, the test is to see it
        return f"{type(error).__name__}: {error}"
    return "built"


def different_batches(folder: Path, *keys: str) -> str:
    """Return the error of a pass for which each of two sharing ranks has other rows."""
    built = worker_jobs.worker(folder, Role.Actor, *keys)
    try:
        built.compute_log_prob(samples([(3, 2 + sharded_jobs.rank())]))
    except RuntimeError as error:
        return str(error)
    return "computed"


def passes(
    folder: Path, batches: list[Lengths], micro: MicroBatching, *keys: str
) -> list[list[tuple[int, int, int]]]:
    """Return (tokens, places with padding, tokens to learn from) of this rank's passes, by mini-batch."""
    built = worker_jobs.worker(folder, Role.Actor, *keys)
    seen: list[tuple[int, int, int]] = []

    def note(module, inputs):
        mask, response_mask = inputs[0]["attention_mask"], inputs[0]["response_mask"]
        seen.append((int(mask.sum()), mask.numel(), int(response_mask.sum())))

    built.engine.module.register_forward_pre_hook(note)
    results = []
    for batch in map(samples, batches):
        seen.clear()
        rows = _mine(built, "update_actor", batch)
        built.engine.forward_backward(rows, sharded_jobs.objective("actor", batch), micro, temperature=0.9)
        built.engine.optimizer_step(0.0)
        results.append(list(seen))
    return results
