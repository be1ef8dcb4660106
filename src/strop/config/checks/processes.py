"""Rules about processes: their number, their placement, and the engine that generates."""

from __future__ import annotations

from collections.abc import Iterator

from strop.config.backends import ENGINES, ROLLOUTS, Kind
from strop.config.checks.finding import Finding, error, warning
from strop.config.names import is_installed
from strop.config.placement import (
    Placement,
    process_count,
    runs_on_ray,
)
from strop.config.roles import roles_of, uses_critic
from strop.config.schema import Config, RootConfig
from strop.config.schema.supervised import SupervisedConfig


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
    elif runs_on_ray(config) and not is_installed("ray"):
        what = f"a run of {processes} processes" if processes > 1 else "trainer.worker_group=ray"
        yield error(f"{what} needs Ray, which is not installed: pip install 'strop[ray]'")


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


def strategies(config: Config) -> Iterator[Finding]:
    """Require one strategy for policy and critic, and its package."""
    actor, critic = config.actor_rollout_ref.actor.strategy, config.critic.strategy
    if uses_critic(config) and actor != critic:
        yield error(
            f"actor_rollout_ref.actor.strategy={actor} and critic.strategy={critic} differ; set both to one"
        )


def back_ends(config: RootConfig) -> Iterator[Finding]:
    """Require the packages of the engines and of the rollout."""
    for key, kind in _kinds(config).items():
        if not kind.installed:
            yield error(f"{key}: the package {kind.package} is not installed: {kind.install}")


def back_end_rules(config: RootConfig) -> Iterator[Finding]:
    """Apply the rules of the engine and of the rollout."""
    for kind in _kinds(config).values():
        if isinstance(config, Config) or "supervised" in kind.offers:
            yield from kind.rules(config)


def _kinds(config: RootConfig) -> dict[str, Kind]:
    """Return the back-ends of a run by the key and the value that name them."""
    if isinstance(config, SupervisedConfig):
        return {f"update.strategy={config.update.strategy}": ENGINES[config.update.strategy]}
    assert isinstance(config, Config)
    strategy, rollout = config.actor_rollout_ref.actor.strategy, config.actor_rollout_ref.rollout.name
    return {
        f"actor_rollout_ref.actor.strategy={strategy}": ENGINES[strategy],
        f"actor_rollout_ref.rollout.name={rollout}": ROLLOUTS[rollout],
    }


def restarts(config: RootConfig) -> Iterator[Finding]:
    """Warn of restarts without checkpoints."""
    trainer = config.trainer
    never = trainer.save_freq < 0 and trainer.save_minutes is None
    if trainer.max_restarts and never and runs_on_ray(config):
        yield warning(
            f"trainer.max_restarts={trainer.max_restarts} with trainer.save_freq=-1 and save_minutes=null: "
            "without checkpoints a restart begins at iteration 0"
        )
