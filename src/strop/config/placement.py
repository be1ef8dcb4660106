"""Placement of roles in pools of processes, and values whose defaults depend on the machine."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from strop.config.backends import ROLLOUTS
from strop.config.gpus import visible_gpus
from strop.config.paths import expand, safetensors_files
from strop.config.roles import has_teacher_role, policy_roles, reference_is_the_actor
from strop.config.schema import Config, RootConfig
from strop.errors import ConfigError

GLOBAL_POOL = "global_pool"

# Passes over the samples that are not the policy's own.
_PASS_ROLES = {
    "ref": "RefPolicy",
    "critic": "Critic",
    "values": "Critic",
    "reward_model": "RewardModel",
    "teacher": "Teacher",
}


@dataclass(frozen=True)
class Placement:
    """The pools of a run, and the pool of each role."""

    pools: dict[str, list[int]]
    """Processes on each node."""
    roles: dict[str, str]
    """Role -> pool, the role that trains the policy first.

    ``Actor`` and ``Rollout`` apart, or ``ActorRollout``, or ``ActorRolloutRef`` without ``RefPolicy``;
    without it, too, if LoRA adapters make it the actor.
    """

    @classmethod
    def from_config(cls, config: Config) -> Placement:
        """Return the placement of a run; ``ConfigError`` has a line for each name that does not fit."""
        pools, policy = pools_of(config), policy_roles(config)
        default = GLOBAL_POOL if GLOBAL_POOL in pools else next(iter(pools))
        apart = [] if "ActorRolloutRef" in policy or reference_is_the_actor(config) else ["RefPolicy"]
        teacher = ["Teacher"] if has_teacher_role(config) or "Teacher" in config.trainer.placement else []
        roles = dict.fromkeys([*policy, "Critic", *apart, "RewardModel", *teacher], default)
        problems = []
        for role, pool in config.trainer.placement.items():
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
    def rollout_role(self) -> str:
        """Role whose processes generate."""
        return "Rollout" if "Rollout" in self.roles else self.role_of_pass("actor")

    def ranks(self, role: str) -> int:
        """Return the number of processes of a role."""
        return sum(self.pools[self.roles[role]])

    def ranks_of_pass(self, name: str) -> int:
        """Return the number of processes that share the pass ``name`` of ``MICRO_BATCHES``."""
        return self.ranks(self.role_of_pass(name))

    def pool_of_pass(self, name: str) -> str:
        """Return the pool of the model that runs the pass ``name``."""
        return self.roles[self.role_of_pass(name)]

    def role_of_pass(self, name: str) -> str:
        """Return the role that runs the pass ``name`` of ``MICRO_BATCHES``; the policy's for other names."""
        role = _PASS_ROLES.get(name)
        return role if role in self.roles else next(iter(self.roles))


def pools_of(config: RootConfig) -> dict[str, list[int]]:
    """Return the processes on each node, by pool."""
    if isinstance(config, Config) and config.trainer.resource_pools:
        return {name: list(spec) for name, spec in config.trainer.resource_pools.items()}
    return {GLOBAL_POOL: [processes_per_node(config)] * config.trainer.nnodes}


def process_count(config: RootConfig) -> int:
    """Return the number of processes over all pools."""
    return sum(sum(spec) for spec in pools_of(config).values())


def runs_on_ray(config: RootConfig) -> bool:
    """Return True if workers run in separate processes (``trainer.worker_group``)."""
    kind = config.trainer.worker_group
    return kind == "ray" or (kind == "auto" and process_count(config) > 1)


def processes_per_node(config: RootConfig) -> int:
    """Return ``trainer.n_gpus_per_node``; unwritten, at most the GPUs of this machine, and 1 without any.

    The default is 8, as in the reference configuration. A number that the user wrote is taken as it is.
    """
    trainer, written = config.trainer, config.written
    if written is None or "trainer.n_gpus_per_node" in written or trainer.nnodes > 1:
        return trainer.n_gpus_per_node
    gpus = visible_gpus() if config.gpus is None else config.gpus
    return max(min(trainer.n_gpus_per_node, 0 if trainer.device == "cpu" else gpus), 1)


_ROLLOUT = "actor_rollout_ref.rollout"


def automatic_rollout(device: str, model_path: str) -> tuple[str, str]:
    """Return the engine of ``actor_rollout_ref.rollout.name=auto`` and the reason; no engine is imported."""
    because = []
    for name, kind in ROLLOUTS.items():
        suits, why = kind.suits(device, model_path)
        because += [why] if why else []
        if suits:
            return name, because[-1]
    raise ConfigError(f"{_ROLLOUT}.name=auto: no engine suits; name one of {', '.join(ROLLOUTS)}")


def is_small(model_path: str, limit: int) -> bool:
    """Return True for a local folder with weights in files of less than ``limit`` bytes."""
    size = 0
    with contextlib.suppress(OSError, ValueError):  # a name on the hub; a path that no file system takes
        size = sum(file.stat().st_size for file in safetensors_files(Path(expand(model_path))))
    return 0 < size < limit


def rollout_in_words(config: Config) -> str:
    """Return the line that names the engine at the start of a run."""
    key, name = f"{_ROLLOUT}.name", config.actor_rollout_ref.rollout.name
    _, is_chosen, why = config.author(key).partition("derived: ")
    return f"rollout: {name} ({key}=auto: {why})" if is_chosen else f"rollout: {name}"


def uses_gpu(config: RootConfig) -> bool:
    """Return True if models compute on GPUs, of this machine or of others."""
    return is_gpu(config.trainer.device)


def is_gpu(device: str) -> bool:
    """Return True if ``trainer.device`` is a GPU; cuda is, though a cluster's driver often has none."""
    return device == "cuda" or (device == "auto" and visible_gpus() > 0)


def is_written(config: RootConfig, key: str) -> bool:
    """Return True if a file or an override wrote the key, or it is not known who did."""
    return config.written is None or key in config.written


Root = TypeVar("Root", bound=RootConfig)


def settled(config: Root) -> Root:
    """Return ``config`` with the values that unwritten keys have in this run: a file writes every key."""
    tree = config.model_dump()
    if not tree["trainer"].get("resource_pools"):
        tree["trainer"]["n_gpus_per_node"] = processes_per_node(config)
    if isinstance(config, Config):
        rollout = tree["actor_rollout_ref"]["rollout"]
        rollout |= ROLLOUTS[config.actor_rollout_ref.rollout.name].settled(config)
    return type(config).model_validate(tree)
