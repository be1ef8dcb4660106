"""Keys under `trainer` that only reinforcement learning has."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from strop.config.schema.base import Count, Expected, PositiveInt
from strop.config.schema.run import RunConfig

RoleName = Literal["Actor", "Rollout", "ActorRollout", "Critic", "RefPolicy", "RewardModel"]
_ProcessesPerNode = Annotated[list[PositiveInt], Field(min_length=1), Expected("processes on each node")]


class TrainerConfig(RunConfig):
    """The run."""

    resource_pools: dict[str, _ProcessesPerNode]
    """Named groups of processes: {name: [processes on each node]}; {}: one, n_gpus_per_node on nnodes."""
    placement: dict[RoleName, str]
    """The pool of a role ({Critic: name}); Actor and Rollout, in place of ActorRollout, split those two."""
    critic_warmup: Count
    """Iterations at the start that update the critic only."""
    log_val_generations: Count
    """Validation samples that the trackers show, the same of every validation; all are in validation/."""
    log_rollouts: bool
    """Write every sample to rollouts/ in default_local_dir."""
