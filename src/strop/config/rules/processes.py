"""Rules about processes: how many there are, where they run, and what needs more than one."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from strop.config.nearest import divisors, nearest_in_words
from strop.config.placement import Placement, runs_on_ray
from strop.config.rules.finding import Finding, error, warning
from strop.config.schema import Config
from strop.errors import ConfigError


def worker_group(config: Config) -> Iterator[Finding]:
    """The kind of worker group suits the number of processes, and what it needs is installed."""
    try:
        processes = Placement.from_config(config).processes
    except ConfigError:
        return  # told with the batch sizes, which need it too
    if config.trainer.worker_group == "local" and processes > 1:
        yield error(
            f"trainer.worker_group=local is one process, and {processes} are asked for by "
            "trainer.n_gpus_per_node, trainer.nnodes or trainer.resource_pools; set it to auto or ray"
        )
    elif runs_on_ray(config) and importlib.util.find_spec("ray") is None:
        yield error(f"{processes} processes run on Ray, which is not installed: pip install 'strop[ray]'")


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


def restarts(config: Config) -> Iterator[Finding]:
    """A restart has something to start from."""
    trainer = config.trainer
    if trainer.max_restarts and not runs_on_ray(config):
        yield warning(f"trainer.max_restarts={trainer.max_restarts} has no effect in one process")
    elif trainer.max_restarts and trainer.save_freq < 0:
        yield warning(
            f"trainer.max_restarts={trainer.max_restarts} with trainer.save_freq=-1: "
            "without checkpoints a restart begins anew"
        )
