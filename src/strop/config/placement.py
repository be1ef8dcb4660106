"""Which role runs in which pool of processes, and how many those are."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from strop.config.roles import policy_roles
from strop.config.schema import Config, RootConfig
from strop.errors import ConfigError

GLOBAL_POOL = "global_pool"
_PASS_ROLES = {
    "ref": "RefPolicy",
    "critic": "Critic",
    "values": "Critic",
    "reward_model": "RewardModel",
}
"""Passes over the samples that are not the policy's own."""


@dataclass(frozen=True)
class Placement:
    """The pools of a run, and the pool of each role."""

    pools: dict[str, list[int]]
    """Processes on each node."""
    roles: dict[str, str]
    """Role -> pool; ``Actor`` and ``Rollout`` apart, or ``ActorRollout``."""

    @classmethod
    def from_config(cls, config: Config) -> Placement:
        """Raises ``ConfigError`` with a line for each name that does not fit."""
        trainer = config.trainer
        pools = {name: list(spec) for name, spec in trainer.resource_pools.items()}
        if not pools:
            pools = {GLOBAL_POOL: [processes_per_node(config)] * trainer.nnodes}
        default = GLOBAL_POOL if GLOBAL_POOL in pools else next(iter(pools))
        policy = policy_roles(config)
        roles = dict.fromkeys([*policy, "Critic", "RefPolicy", "RewardModel"], default)
        problems = []
        for role, pool in trainer.placement.items():
            if role not in roles:
                problems.append(
                    f"trainer.placement.{role}: with actor_rollout_ref.hybrid_engine="
                    f"{config.actor_rollout_ref.hybrid_engine} the policy's roles are {', '.join(policy)}"
                )
            elif pool not in pools:
                problems.append(
                    f"trainer.placement.{role}={pool}: no such pool; trainer.resource_pools has "
                    f"{', '.join(pools)}"
                )
            roles[role] = pool
        if problems:
            raise ConfigError(*problems)
        return cls(pools, roles)

    @property
    def processes(self) -> int:
        """Over all pools."""
        return sum(sum(spec) for spec in self.pools.values())

    def ranks(self, role: str) -> int:
        """The number of processes of a role."""
        return sum(self.pools[self.roles[role]])

    def ranks_of_pass(self, name: str) -> int:
        """The number of processes that share the pass ``name`` of ``MICRO_BATCHES``."""
        policy = "ActorRollout" if "ActorRollout" in self.roles else "Actor"
        return self.ranks(_PASS_ROLES.get(name, policy))


def runs_on_ray(config: Config) -> bool:
    """Whether workers run in processes of their own (``trainer.worker_group``)."""
    return group_is_on_ray(config, Placement.from_config(config).processes)


def group_is_on_ray(config: RootConfig, processes: int) -> bool:
    """The same for a run of so many processes."""
    kind = config.trainer.worker_group
    return kind == "ray" or (kind == "auto" and processes > 1)


def processes_per_node(config: RootConfig) -> int:
    """``trainer.n_gpus_per_node``; where nobody wrote it, no more than the GPUs here, and 1 without any."""
    trainer, written = config.trainer, config.written
    if written is None or "trainer.n_gpus_per_node" in written or trainer.nnodes > 1:
        return trainer.n_gpus_per_node
    gpus = 0 if trainer.device == "cpu" else visible_gpus()
    return max(min(trainer.n_gpus_per_node, gpus), 1)


def visible_gpus() -> int:
    """GPUs that this process may use; counted without torch, whose import takes seconds."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return len([name for name in listed.split(",") if name.strip() not in ("", "-1")])
    return len([path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])
