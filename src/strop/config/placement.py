"""Which role runs in which pool of processes, and how many those are."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.config.backends import ROLLOUTS
from strop.config.load import to_dict
from strop.config.roles import policy_roles
from strop.config.schema import Config, RootConfig
from strop.config.schema.policy import VLLMSamplingConfig
from strop.config.trees import Root
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


# What keys of the rollout come to where nobody wrote them: the defaults are those of a GPU.

_ROLLOUT = "actor_rollout_ref.rollout"


NEUTRAL: dict[str, Any] = {
    "min_p": 0.0,
    "min_tokens": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "bad_words": [],
    "stop": [],
}


"""The values of vLLM's sampling keys with which they do nothing; null for the others."""


KEEPS_THE_POLICY = frozenset({"stop", "repetition_detection"})


"""Those that end a response and leave its distribution as it is."""


def honours(config: Config, key: str) -> bool:
    """Return True if the chosen rollout honours ``key`` of ``actor_rollout_ref.rollout``."""
    return key in ROLLOUTS[config.actor_rollout_ref.rollout.name].keys


def rollout_dtype(config: Config) -> str:
    """Dtype of the rollout's weights: the actor's computing dtype, unless another one is written."""
    dtype = config.actor_rollout_ref.rollout.dtype
    if dtype == "auto" or not honours(config, "dtype") or not _is_written(config, "dtype"):
        return config.actor_rollout_ref.model.compute_dtype
    return dtype


def tensor_parallel_size(config: Config) -> int:
    """Ranks that run one rollout engine together; a default that does not suit the ranks counts as 1.

    Raises ``ConfigError`` when the written size does not divide them.
    """
    size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    if not honours(config, "tensor_model_parallel_size"):
        return 1
    placement = Placement.from_config(config)
    ranks = placement.ranks("Rollout" if "Rollout" in placement.roles else "ActorRollout")
    if not _is_written(config, "tensor_model_parallel_size"):
        return size if ranks % size == 0 and config.trainer.device != "cpu" and visible_gpus() else 1
    if ranks % size:
        raise ConfigError(
            f"{_ROLLOUT}.tensor_model_parallel_size={size} does not divide the {ranks} ranks of the rollout"
        )
    return size


def extra_sampling(config: Config) -> dict[str, object]:
    """The fields of vLLM's ``SamplingParams`` that the run sets beyond those of every generator."""
    rollout = config.actor_rollout_ref.rollout
    if not ROLLOUTS[rollout.name].extra_sampling:
        return {}
    values = {name: getattr(rollout, name) for name in VLLMSamplingConfig.model_fields}
    return {name: value for name, value in values.items() if value != NEUTRAL.get(name)}


def _is_written(config: Config, key: str) -> bool:
    return config.written is None or f"{_ROLLOUT}.{key}" in config.written


# The configuration as a file that repeats the run: what depends on who wrote a key is written out.


def settled(config: Root) -> Root:
    """``config`` with the values that unwritten keys come to in this run: in a file every key is written."""
    tree = to_dict(config)
    if not tree["trainer"].get("resource_pools"):
        tree["trainer"]["n_gpus_per_node"] = processes_per_node(config)
    if isinstance(config, Config):
        _settle_rollout(config, tree["actor_rollout_ref"]["rollout"])
    return type(config).model_validate(tree)


def _settle_rollout(config: Config, rollout: dict[str, Any]) -> None:
    if honours(config, "dtype"):
        rollout["dtype"] = rollout_dtype(config)
    if honours(config, "tensor_model_parallel_size"):
        rollout["tensor_model_parallel_size"] = tensor_parallel_size(config)
