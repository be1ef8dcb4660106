"""Keys under `trainer`: those of any kind of run, and those of reinforcement learning."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from strop.config.schema.base import (
    MAY_CHANGE,
    NOT_COMPARED,
    Count,
    Every,
    Expected,
    Names,
    PositiveFloat,
    PositiveInt,
    Processes,
    Seconds,
    Section,
    Seed,
    Text,
    no_effect,
)
from strop.config.schema.critic import NO_CRITIC
from strop.config.schema.data import NO_VALIDATION

KEPT_BY_TIME = 2
"""Checkpoints of ``save_minutes`` that are kept, besides the one of the best validation."""

_NO_CHECKPOINTS = no_effect(
    "with trainer.save_freq=-1 and trainer.save_minutes=null",
    lambda at: at.value and at.section.save_freq < 0 and at.section.save_minutes is None,
    "no checkpoints are written",
)

_BY_TIME_ALONE = no_effect(
    "with trainer.save_freq=-1",
    lambda at: at.value and at.section.save_freq < 0,
    "of the checkpoints that trainer.save_minutes writes the last two are kept, and the best validated one",
)

_OTHER_POOLS = no_effect(
    "with trainer.resource_pools",
    lambda at: bool(getattr(at.section, "resource_pools", None)),  # supervised runs have no such key
    "these give the number of processes",
)


_ONE_PROCESS = no_effect("with one process", lambda at: bool(at.value) and not at.on_ray)

_ONE_POOL = no_effect(
    "with one process",
    lambda at: bool(at.value) and not at.on_ray and len(at.section.resource_pools) < 2,
)

_NO_ROLLOUTS = no_effect("with trainer.log_rollouts=False", lambda at: not at.section.log_rollouts)

_NOT_PUBLISHED = no_effect("with trainer.push_to_hub=False", lambda at: not at.section.push_to_hub)


class RunConfig(Section, resumes=MAY_CHANGE):
    """The run."""

    total_epochs: PositiveInt
    """Passes over the training prompts."""
    total_training_steps: PositiveInt | None
    """Iterations of the run; null: as many as total_epochs gives."""
    project_name: str
    """Project in the trackers and in default_local_dir."""
    experiment_name: Annotated[str, Expected("string or null"), NOT_COMPARED]
    """Run in the trackers and in default_local_dir; null: that folder's name, or one from what is trained."""
    logger: Names
    """console, tensorboard, wandb, trackio, mlflow, swanlab, or an import path; always also metrics.jsonl."""
    nnodes: Annotated[Processes, _OTHER_POOLS]
    """Machines; more than one needs a Ray cluster that runs on them."""
    n_gpus_per_node: Annotated[Processes, _OTHER_POOLS]
    """Processes (GPUs) on each machine. If not set: at most the GPUs of this machine, and 1 without any."""
    export_dtype: Literal["float32", "bfloat16", "float16"] | None
    """Dtype of the weights in exported models; null: that of model.path. Checkpoints' state is float32."""
    worker_group: Literal["auto", "local", "ray"]
    """Workers run in this process (local) or each in its own (ray); auto: ray if there is more than one."""
    handles: Annotated[bool, no_effect("with one process", lambda at: not at.value and not at.on_ray)]
    """Ray: batches stay with the workers, and the driver fetches only the columns that it reads."""
    device: Literal["auto", "cpu", "cuda"]
    """auto: the GPU if there is one."""
    seed: Seed
    """The one seed that all random streams derive from."""
    save_freq: Every
    """Save a checkpoint every this many iterations."""
    save_minutes: PositiveFloat | None
    """Save one too when an iteration ends this long after the last save; null with save_freq=-1: never."""
    async_save: Annotated[bool, _NO_CHECKPOINTS]
    """Write checkpoints in the background, from a copy in CPU memory, while training goes on."""
    max_ckpt_to_keep: Annotated[PositiveInt | None, _BY_TIME_ALONE]
    """Checkpoints of save_freq to keep, the newest ones; null: all."""
    test_freq: Annotated[Every, NO_VALIDATION]
    """Validate every this many iterations."""
    val_before_train: Annotated[bool, NO_VALIDATION]
    """Validate before the first iteration."""
    val_only: bool
    """Validate once and stop."""
    resume_mode: Annotated[Text, NOT_COMPARED]
    """auto: newest of the same run in default_local_dir or default_hdfs_dir; disable; path or URL of one."""
    max_restarts: Annotated[Count, _ONE_PROCESS]
    """Most restarts from the last checkpoint, after a worker died or hung."""
    phase_timeout_s: Annotated[Seconds | None, _ONE_PROCESS]
    """Ray: seconds after which a call to workers counts as hung (loading: at least 600); null: no limit."""
    default_hdfs_dir: Text | None
    """Folder for copies of the checkpoints: hdfs://, s3://, any fsspec URL or path; null: none."""
    default_local_dir: Annotated[Text, NOT_COMPARED]
    """Run folder: checkpoints, metrics, samples, resolved config."""
    push_to_hub: Annotated[bool, no_effect("with trainer.val_only", lambda at: at.section.val_only)]
    """At the end, upload the trained model with a model card to the hub (strop docs publishing)."""
    hub_repo_id: Annotated[Text | None, _NOT_PUBLISHED]
    """Repository, as owner/name or a name of yours; null: experiment_name. It is created if it is missing."""
    hub_revision: Annotated[Text | None, _NOT_PUBLISHED]
    """Branch; null: EXPERIMENT__SEED__TIME (Unix), which a resume uses again."""
    hub_private: Annotated[bool, _NOT_PUBLISHED]
    """Create the repository as a private one; one that exists stays as it is."""


class PairRunConfig(RunConfig):
    """The run."""

    log_val_generations: Annotated[Count, NO_VALIDATION]
    """Validation pairs that the trackers show with both scores (dpo: rewards), the same each time."""


RoleName = Literal[
    "Actor", "Rollout", "ActorRollout", "ActorRolloutRef", "Critic", "RefPolicy", "RewardModel", "Teacher"
]

_ProcessesPerNode = Annotated[list[Processes], Field(min_length=1), Expected("processes on each node")]


class TrainerConfig(RunConfig):
    """The run, and the placement of its roles."""

    resource_pools: Annotated[dict[str, _ProcessesPerNode], _ONE_POOL]
    """Named groups of processes: {name: [processes on each node]}; {}: one, n_gpus_per_node on nnodes."""
    placement: Annotated[dict[RoleName, str], _ONE_POOL]
    """The pool of a role ({Critic: name}); ActorRollout may be Actor and Rollout, or ActorRolloutRef."""
    async_steps: Count
    """Iterations by which generation may run ahead of training; 0: none (strop docs asynchronous)."""
    critic_warmup: Annotated[Count, NO_CRITIC]
    """Iterations at the start that update the critic only."""
    warn_without_signal: PositiveInt | None
    """Warn when all scores are equal, or all advantages 0, for this many iterations in a row; null: never."""
    log_val_generations: Annotated[Count, NO_VALIDATION]
    """Validation samples that the trackers show, the same each time; validation/ has all of them."""
    log_rollouts: bool
    """Write all samples of an iteration to a file in rollouts/ of default_local_dir."""
    log_rollouts_freq: Annotated[PositiveInt, _NO_ROLLOUTS]
    """Write them every this many iterations, and after the last."""
    rollouts_to_keep: Annotated[PositiveInt | None, _NO_ROLLOUTS]
    """Files to keep in rollouts/, the newest ones; null: all."""
