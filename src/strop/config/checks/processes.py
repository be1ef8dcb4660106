"""Rules about processes: their number, their placement, and the engine that generates."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import get_args

from strop.config.backends import ENGINES, ROLLOUTS
from strop.config.batch_plan import MICRO_BATCHES, forward_passes, sequence_parallel_size, strategy_of
from strop.config.checks.finding import Finding, error, warning
from strop.config.keys import divisors, nearest_in_words, value_at
from strop.config.memory.facts import read_model_facts
from strop.config.placement import (
    SMALL_ON_A_GPU,
    Placement,
    generates_beside_the_learner,
    honours,
    is_small,
    process_count,
    rollout_dtype,
    runs_on_ray,
    seed_per_sample,
    tensor_parallel_size,
    uses_gpu,
)
from strop.config.roles import roles_of, uses_critic, uses_full_kl
from strop.config.schema import Config, RootConfig
from strop.config.schema.base import FsdpConfig
from strop.config.schema.policy import LoadFormat
from strop.errors import ConfigError


def worker_group(config: RootConfig) -> Iterator[Finding]:
    """Require a kind of worker group that suits the number of processes."""
    processes = process_count(config)
    if config.trainer.worker_group == "local" and processes > 1:
        keys, each = "trainer.n_gpus_per_node and trainer.nnodes", ""
        if isinstance(config, Config) and config.trainer.resource_pools:
            if all(sum(spec) == 1 for spec in config.trainer.resource_pools.values()):
                return  # threads
            keys, each = "trainer.resource_pools", ", with pools of one: [1]"
        yield error(
            f"trainer.worker_group=local is one process{each}, but {keys} give {processes}; set it to auto "
            "or ray"
        )
    elif runs_on_ray(config) and importlib.util.find_spec("ray") is None:
        yield error(f"{processes} processes run on Ray, which is not installed: pip install 'strop[ray]'")


def placement(config: Config) -> Iterator[Finding]:
    """Require a role of this run for every pool; warn of placed roles that the run does not have."""
    trainer, present, placed = config.trainer, roles_of(config), Placement.from_config(config)
    used = {placed.roles[role] for role in present}
    for pool in placed.pools:
        if pool not in used and not trainer.val_only:  # validation keeps the pools of its training run
            where = ", ".join(f"{role}: {placed.roles[role]}" for role in present)
            yield error(f"trainer.resource_pools.{pool}: no role of this run is placed there ({where})")
    for role in trainer.placement:
        if role not in present and role in placed.roles and not trainer.val_only:
            yield warning(f"no effect: trainer.placement.{role}: this run has no such role")


def generation_ahead(config: Config) -> Iterator[Finding]:
    """Require a pool for the rollout alone if it generates ahead of training."""
    steps, placed = config.trainer.async_steps, Placement.from_config(config).roles
    if not steps or config.trainer.val_only:
        return
    given = f"trainer.async_steps={steps}"
    if "Rollout" not in placed or placed["Rollout"] == placed["Actor"]:
        yield error(
            f"{given}: the rollout cannot generate while the actor in the same processes is updated; set "
            "actor_rollout_ref.hybrid_engine=False, trainer.resource_pools={learner: [1], rollout: [1]} and "
            "trainer.placement={Rollout: rollout}"
        )
        return
    beside = [role for role in roles_of(config) if role != "Rollout" and placed[role] == placed["Rollout"]]
    if beside:
        yield warning(
            f"{given}: {' and '.join(beside)} in the rollout's pool ({placed['Rollout']}) waits for each "
            "generation to end; place it in another pool by trainer.placement"
        )


def hybrid_sharding(config: Config) -> Iterator[Finding]:
    """Require ranks of a role that divide into groups of `fsdp_size`."""
    ranks_of_pass = Placement.from_config(config).ranks_of_pass
    sections = {
        "actor_rollout_ref.actor.fsdp_config": ("actor", config.actor_rollout_ref.actor.fsdp_config),
        "critic.model.fsdp_config": ("critic", config.critic.model.fsdp_config),
    }
    for key, (name, section) in sections.items():
        yield from sharded_groups(key, section, ranks_of_pass(name))


def sharded_groups(key: str, section: FsdpConfig, ranks: int) -> Iterator[Finding]:
    """Require a `fsdp_size` in the section `key` that divides the ranks."""
    size = section.fsdp_size
    if 1 < size < ranks and ranks % size:
        working = nearest_in_words(size, divisors(ranks))
        yield error(f"{key}.fsdp_size={size} does not divide the {ranks} ranks ({working}; -1: all)")


def shared_sequences(config: Config) -> Iterator[Finding]:
    """Require packed rows, and heads that divide, where ranks share sequences."""
    ranks_of_pass = Placement.from_config(config).ranks_of_pass
    models = {"values": "critic.model", "reward_model": "reward_model.model"}
    for name in forward_passes(config):
        try:
            size = sequence_parallel_size(config, name, ranks_of_pass(name))
        except ConfigError:
            continue  # reported with the batch sizes
        if size == 1:
            continue
        key = MICRO_BATCHES[name].sequence_parallel
        path = value_at(config, f"{models.get(name, 'actor_rollout_ref.model')}.path")
        padding_key = f"{'critic' if name == 'values' else 'actor_rollout_ref'}.model.use_remove_padding"
        if not value_at(config, padding_key):
            yield error(f"{key}={size} shares packed rows; set {padding_key}=True")
        facts = read_model_facts(path)
        if facts is not None and facts.heads % size:
            working = nearest_in_words(size, divisors(facts.heads))
            yield error(
                f"{key}={size} does not divide the {facts.heads} attention heads of {path} ({working})"
            )


def strategies(config: Config) -> Iterator[Finding]:
    """Require one strategy for policy and critic, and its package."""
    actor, critic = config.actor_rollout_ref.actor.strategy, config.critic.strategy
    if uses_critic(config) and actor != critic:
        yield error(
            f"actor_rollout_ref.actor.strategy={actor} and critic.strategy={critic} differ; set both to one"
        )
    package = ENGINES[actor].package
    if package is not None and importlib.util.find_spec(package) is None:
        yield error(
            f"actor_rollout_ref.actor.strategy={actor} needs the package {package}-core, which is not "
            f"installed: pip install 'strop[{actor}]'"
        )
    if actor == "megatron" and uses_full_kl(config):
        yield error(
            "the full KL (algorithm.kl_penalty or actor_rollout_ref.actor.kl_loss_type) needs whole logits, "
            "which strategy=megatron never computes; set it to k3, for example, or strategy=fsdp"
        )


def megatron_layouts(config: Config) -> Iterator[Finding]:
    """Require heads, layers and experts that divide, and one layout for all models in a pool."""
    placed, of_pool = Placement.from_config(config), dict[str, tuple[str, tuple[int | None, ...]]]()
    passes = ["actor", *(name for name in forward_passes(config) if name in ("ref", "reward_model"))]
    for name in [*passes, *(["critic"] if uses_critic(config) else [])]:
        if strategy_of(config, name) != "megatron":
            continue
        key = MICRO_BATCHES[name].megatron
        layout = value_at(config, key)
        tensor, pipeline = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
        experts = layout.expert_model_parallel_size
        sizes = (tensor, pipeline, layout.virtual_pipeline_model_parallel_size, experts)
        other, others = of_pool.setdefault(placed.pool_of_pass(name), (key, sizes))
        if others != sizes:
            yield error(
                f"{key} and {other} have the tensor, pipeline, virtual pipeline and expert sizes {sizes} and "
                f"{others}, and their models are in one pool; make them equal, or use different pools"
            )
        models = {"critic": "critic.model", "reward_model": "reward_model.model"}
        path = value_at(config, f"{models.get(name, 'actor_rollout_ref.model')}.path")
        if (facts := read_model_facts(path)) is None:
            continue
        stages = pipeline * (layout.virtual_pipeline_model_parallel_size or 1)
        uneven = any(entry.startswith("num_layers_in_") for entry in layout.override_transformer_config)
        if facts.heads % tensor or facts.kv_heads % tensor:
            yield error(
                f"{key}.tensor_model_parallel_size={tensor} does not divide the {facts.heads} attention "
                f"heads and {facts.kv_heads} key-value heads of {path}"
            )
        if experts > 1 and not facts.experts:
            yield error(
                f"{key}.expert_model_parallel_size={experts}: {path} has no routed experts; set it to 1"
            )
        elif facts.experts % experts:
            yield error(
                f"{key}.expert_model_parallel_size={experts} does not divide the {facts.experts} routed "
                f"experts of a layer of {path}"
            )
        if facts.experts and tensor > 1 and not layout.sequence_parallel:
            yield error(
                f"{key}.sequence_parallel=False with tensor_model_parallel_size={tensor}: every rank would "
                f"send its copy of a token to the experts of {path}; set it to True"
            )
        if facts.layers % stages and not uneven:
            yield error(
                f"{key}: the {facts.layers} layers of {path} do not divide into {stages} stages "
                f"(pipeline_model_parallel_size={pipeline}, virtual_pipeline_model_parallel_size={sizes[2]})"
            )


def restarts(config: RootConfig) -> Iterator[Finding]:
    """Warn of restarts without checkpoints."""
    trainer = config.trainer
    if trainer.max_restarts and trainer.save_freq < 0 and runs_on_ray(config):
        yield warning(
            f"trainer.max_restarts={trainer.max_restarts} with trainer.save_freq=-1: without checkpoints a "
            "restart begins at iteration 0"
        )


def tensor_parallelism(config: Config) -> Iterator[Finding]:
    """Require rollout ranks that divide into groups of one vLLM engine each."""
    try:
        tensor_parallel_size(config)
    except ConfigError as problem:
        yield error(str(problem))


def batches(config: Config) -> Iterator[Finding]:
    """Require room for a token of every sequence in a step of vLLM."""
    rollout = config.actor_rollout_ref.rollout
    if honours(config, "max_num_seqs") and rollout.max_num_batched_tokens < rollout.max_num_seqs:
        yield error(
            f"actor_rollout_ref.rollout.max_num_batched_tokens={rollout.max_num_batched_tokens} is less than "
            f"max_num_seqs={rollout.max_num_seqs}: a step takes a token of each sequence; lower the latter"
        )


def weights_at_start(config: Config) -> Iterator[Finding]:
    """Warn of a `load_format` that names a loader: it only chooses between the folder's weights and none."""
    name = config.actor_rollout_ref.rollout.load_format
    if not honours(config, "load_format") or name in ("auto", "dummy_dtensor"):
        return
    is_dummy = name.startswith("dummy_")
    same = [
        other for other in get_args(LoadFormat) if other.startswith("dummy_") == is_dummy and other != name
    ]
    start = "without weights" if is_dummy else "with the model folder's weights"
    yield warning(
        f"actor_rollout_ref.rollout.load_format={name} means the same as {', '.join(same)}: vLLM starts "
        f"{start}, and the trainer sends its own, sharded or not, before the first sample"
    )


def seeds(config: Config) -> Iterator[Finding]:
    """Refuse a seed for each call where other threads draw from the same generators meanwhile."""
    if not honours(config, "seed_per_sample") or seed_per_sample(config) is not False:
        return
    if generates_beside_the_learner(config):
        yield error(
            f"actor_rollout_ref.rollout.seed_per_sample=False with trainer.async_steps="
            f"{config.trainer.async_steps} on threads: vLLM draws from the process's generators while the "
            "learner uses them; set trainer.worker_group=ray, or seed_per_sample=auto"
        )


def eager_generation(config: Config) -> Iterator[Finding]:
    """Warn of hf on a GPU, except for small models."""
    path, rollout = config.actor_rollout_ref.model.path, config.actor_rollout_ref.rollout
    if rollout.name == "hf" and uses_gpu(config) and not is_small(path, SMALL_ON_A_GPU):
        install = "" if ROLLOUTS["vllm"].installed else "pip install 'strop[vllm]' and "
        yield warning(
            "actor_rollout_ref.rollout.name=hf on a GPU: it launches every operation of a decoding step from "
            f"Python, and the GPU waits for it; {install}set it to vllm, which replays CUDA graphs"
        )


def precision(config: Config) -> Iterator[Finding]:
    """Warn if vLLM's precision differs from the trainer's: the sampler is then another policy."""
    section = config.actor_rollout_ref
    sampler, trainer = rollout_dtype(config), section.model.compute_dtype
    computed = {"auto": "bfloat16" if uses_gpu(config) else "float32"}
    corrected = section.actor.rollout_is is not None or section.actor.use_rollout_log_probs
    if computed.get(sampler, sampler) != computed.get(trainer, trainer) and not corrected:
        yield warning(
            f"actor_rollout_ref.rollout.dtype={sampler} with model.compute_dtype={trainer}: the sampler's "
            "probabilities differ from the trainer's; actor.rollout_is corrects for it, "
            "training/rollout_probs_diff_mean shows by how much"
        )
