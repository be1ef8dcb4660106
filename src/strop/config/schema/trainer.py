"""Keys under `trainer` that only reinforcement learning has."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from strop.config.schema.base import Count, Every, Expected, Names, PositiveFloat, PositiveInt, Section

# Keys under `trainer` of every kind of run: how long, where, and what is written down.


class RunConfig(Section):
    """The run."""

    total_epochs: PositiveInt
    """Passes over the training prompts."""
    total_training_steps: PositiveInt | None
    """Iterations of the run; null: as many as total_epochs gives."""
    project_name: str
    """Project in the trackers and in default_local_dir."""
    experiment_name: str
    """Run in the trackers and in default_local_dir."""
    logger: Names
    """Trackers: console, tensorboard, wandb, or your own's import path; metrics.jsonl is always written."""
    nnodes: PositiveInt
    """Machines; more than one needs a Ray cluster that runs on them."""
    n_gpus_per_node: PositiveInt
    """Processes (GPUs) on each machine; a default of more than are there means those that are (CPU: 1)."""
    worker_group: Literal["auto", "local", "ray"]
    """Workers run in this process (local) or each in its own (ray); auto: ray if there is more than one."""
    handles: bool
    """Ray: batches stay with the workers, and the driver fetches only the columns that it reads."""
    device: Literal["auto", "cpu", "cuda"]
    """auto: the GPU if there is one."""
    seed: Count
    """The one seed that all random streams derive from."""
    save_freq: Every
    """Save a checkpoint every this many iterations."""
    async_save: bool
    """Write checkpoints in the background, from a copy in CPU memory, while training goes on."""
    max_ckpt_to_keep: PositiveInt | None
    """Checkpoints to keep, the newest ones; null: all."""
    test_freq: Every
    """Validate every this many iterations."""
    val_before_train: bool
    """Validate before the first iteration."""
    val_only: bool
    """Validate once and stop."""
    resume_mode: str
    """auto: newest in default_local_dir, else in default_hdfs_dir; disable: never; or path or URL of one."""
    max_restarts: Count
    """When a worker dies or hangs: start again from the last checkpoint, at most this many times."""
    phase_timeout_s: PositiveFloat | None
    """Ray: a longer call to workers has hung and ends the run (loading: at least 600 s); null: no limit."""
    default_hdfs_dir: str | None
    """Folder for copies of the checkpoints: hdfs://, s3://, any fsspec URL or path; null, default: none."""
    default_local_dir: str
    """Run folder: checkpoints, metrics, samples, resolved config."""


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
