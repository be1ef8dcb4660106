"""Rules about processes: how many there are, where they run, and what needs more than one."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from strop.config.backends import ROLLOUTS
from strop.config.batch_plan import MICRO_BATCHES, sequence_parallel_size
from strop.config.checks.finding import Finding, error, warning
from strop.config.forecast import read_model_facts
from strop.config.keys import divisors, nearest_in_words
from strop.config.placement import (
    Placement,
    group_is_on_ray,
    rollout_dtype,
    runs_on_ray,
    tensor_parallel_size,
    visible_gpus,
)
from strop.config.roles import roles_of, uses_critic, uses_reference
from strop.config.schema import Config, RootConfig
from strop.config.schema.trainer import RunConfig, TrainerConfig
from strop.errors import ConfigError


def worker_group(config: Config) -> Iterator[Finding]:
    """The kind of worker group suits the number of processes, and what it needs is installed."""
    try:
        processes = Placement.from_config(config).processes
    except ConfigError:
        return  # told with the batch sizes, which need it too
    keys = "trainer.n_gpus_per_node, trainer.nnodes or trainer.resource_pools"
    yield from group_of(config, processes, asked_by=keys)


def group_of(config: RootConfig, processes: int, *, asked_by: str) -> Iterator[Finding]:
    """The kind of worker group suits so many ``processes``; ``asked_by``: the keys that ask for them."""
    if config.trainer.worker_group == "local" and processes > 1:
        yield error(
            f"trainer.worker_group=local is one process, and {processes} are asked for by {asked_by}; "
            "set it to auto or ray"
        )
    elif group_is_on_ray(config, processes) and importlib.util.find_spec("ray") is None:
        yield error(f"{processes} processes run on Ray, which is not installed: pip install 'strop[ray]'")


def placement(config: Config) -> Iterator[Finding]:
    """Every pool has a role of this run, and every role that is placed is one."""
    trainer, present = config.trainer, roles_of(config)
    try:
        placed = Placement.from_config(config)
    except ConfigError:
        return
    used = {placed.roles[role] for role in present}
    for pool in placed.pools:
        if pool not in used and not trainer.val_only:  # which takes the pools of a training run as they are
            where = ", ".join(f"{role}: {placed.roles[role]}" for role in present)
            yield error(f"trainer.resource_pools.{pool}: no role of this run is placed there ({where})")
    for role in trainer.placement:
        if role not in present and role in placed.roles and not trainer.val_only:
            yield warning(f"no effect: trainer.placement.{role}: this run has no such role")


def without_effect(config: Config) -> Iterator[Finding]:
    """Keys about processes that change nothing beside other keys."""
    trainer, written = config.trainer, config.written or frozenset()
    if trainer.resource_pools:
        for key in ("nnodes", "n_gpus_per_node"):
            if f"trainer.{key}" in written:
                yield warning(
                    f"no effect: trainer.{key}; trainer.resource_pools says how many processes there are"
                )
    try:
        on_ray = runs_on_ray(config)
    except ConfigError:
        return
    yield from run_without_effect(trainer, on_ray=on_ray)


def run_without_effect(trainer: RunConfig, *, on_ray: bool) -> Iterator[Finding]:
    """Keys of any kind of run that need several processes, or checkpoints."""
    if not on_ray:
        ignored = {"phase_timeout_s": trainer.phase_timeout_s is not None, "handles": not trainer.handles}
        if isinstance(trainer, TrainerConfig):
            ignored |= {"placement": bool(trainer.placement), "resource_pools": bool(trainer.resource_pools)}
        if names := [f"trainer.{key}" for key, is_set in ignored.items() if is_set]:
            yield warning(f"no effect (the run is one process): {', '.join(names)}")
    if trainer.save_freq < 0 and (trainer.async_save or trainer.max_ckpt_to_keep):
        names = [key for key in ("async_save", "max_ckpt_to_keep") if getattr(trainer, key)]
        yield warning(f"no effect (trainer.save_freq=-1): {', '.join(f'trainer.{key}' for key in names)}")


def hybrid_sharding(config: Config) -> Iterator[Finding]:
    """The ranks of a role divide into copies of `fsdp_size` ranks."""
    try:
        ranks_of_pass = Placement.from_config(config).ranks_of_pass
    except ConfigError:
        return
    sections = {
        "actor_rollout_ref.actor.fsdp_config": ("actor", config.actor_rollout_ref.actor.fsdp_config),
        "critic.model.fsdp_config": ("critic", config.critic.model.fsdp_config),
    }
    for key, (name, section) in sections.items():
        ranks, size = ranks_of_pass(name), section.fsdp_size
        if 1 < size < ranks and ranks % size:
            yield error(
                f"{key}.fsdp_size={size} does not divide the {ranks} ranks "
                f"({nearest_in_words(size, divisors(ranks))}; -1: all)"
            )


def shared_sequences(config: Config) -> Iterator[Finding]:
    """Ranks share packed rows, of models whose heads they can divide among them."""
    try:
        ranks_of_pass = Placement.from_config(config).ranks_of_pass
    except ConfigError:
        return
    policy, critic, reward = config.actor_rollout_ref.model, config.critic.model, config.reward_model
    packs_policy = "actor_rollout_ref.model.use_remove_padding", policy.use_remove_padding
    passes = {
        "actor": (True, packs_policy, policy.path),
        "ref": (uses_reference(config), packs_policy, policy.path),
        "critic": (
            uses_critic(config),
            ("critic.model.use_remove_padding", critic.use_remove_padding),
            critic.path,
        ),
        "reward_model": (reward.enable, packs_policy, reward.model.path),
    }
    for name, (present, (padding_key, packed), path) in passes.items():
        try:
            size = sequence_parallel_size(config, name, ranks_of_pass(name))
        except ConfigError:
            continue  # told with the batch sizes, which need it too
        if size == 1 or not present:
            continue
        key = MICRO_BATCHES[name].sequence_parallel
        if not packed:
            yield error(f"{key}={size} shares packed rows; set {padding_key}=True")
        facts = read_model_facts(path)
        if facts is not None and facts.heads % size:
            working = nearest_in_words(size, divisors(facts.heads))
            yield error(
                f"{key}={size} does not divide the {facts.heads} attention heads of {path} ({working})"
            )


def restarts(config: Config) -> Iterator[Finding]:
    """See ``run_restarts``."""
    try:
        on_ray = runs_on_ray(config)
    except ConfigError:
        return
    yield from run_restarts(config.trainer, on_ray=on_ray)


def run_restarts(trainer: RunConfig, *, on_ray: bool) -> Iterator[Finding]:
    """A restart has something to start from."""
    if trainer.max_restarts and not on_ray:
        yield warning(f"trainer.max_restarts={trainer.max_restarts} has no effect in one process")
    elif trainer.max_restarts and trainer.save_freq < 0:
        yield warning(
            f"trainer.max_restarts={trainer.max_restarts} with trainer.save_freq=-1: "
            "without checkpoints a restart begins anew"
        )


# Rules about the engine that generates.


def tensor_parallelism(config: Config) -> Iterator[Finding]:
    """The ranks of the rollout divide into groups that run one vLLM engine each."""
    try:
        tensor_parallel_size(config)
    except ConfigError as problem:
        yield error(str(problem))


def batches(config: Config) -> Iterator[Finding]:
    """A step of vLLM has room for a token of every sequence."""
    rollout = config.actor_rollout_ref.rollout
    schedules = "max_num_seqs" in ROLLOUTS[rollout.name].keys
    if schedules and rollout.max_num_batched_tokens < rollout.max_num_seqs:
        yield error(
            f"actor_rollout_ref.rollout.max_num_batched_tokens={rollout.max_num_batched_tokens} is less than "
            f"max_num_seqs={rollout.max_num_seqs}: a step takes a token of each sequence; lower the latter"
        )


def precision(config: Config) -> Iterator[Finding]:
    """A sampler of lower precision than the trainer is another policy."""
    section = config.actor_rollout_ref
    sampler, trainer = rollout_dtype(config), section.model.compute_dtype
    computed = {"auto": "bfloat16" if visible_gpus() and config.trainer.device != "cpu" else "float32"}
    if computed.get(sampler, sampler) != computed.get(trainer, trainer) and section.actor.rollout_is is None:
        yield warning(
            f"actor_rollout_ref.rollout.dtype={sampler} with model.compute_dtype={trainer}: the sampler's "
            "probabilities differ from the trainer's; actor.rollout_is corrects for it, "
            "training/rollout_probs_diff_mean tells how much"
        )
