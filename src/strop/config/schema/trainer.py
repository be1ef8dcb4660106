"""Keys under `trainer`: how long, where, and what is written down."""

from __future__ import annotations

from typing import Literal

from strop.config.schema.base import Count, Every, Names, PositiveInt, Section


class TrainerConfig(Section):
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
    """Machines."""
    n_gpus_per_node: PositiveInt
    """Processes (GPUs) on each machine."""
    device: Literal["auto", "cpu", "cuda"]
    """auto: the GPU if there is one."""
    seed: Count
    """The one seed that all random streams derive from."""
    save_freq: Every
    """Save a checkpoint every this many iterations."""
    max_ckpt_to_keep: PositiveInt | None
    """Checkpoints to keep, the newest ones; null: all."""
    test_freq: Every
    """Validate every this many iterations."""
    val_before_train: bool
    """Validate before the first iteration."""
    val_only: bool
    """Validate once and stop."""
    critic_warmup: Count
    """Iterations at the start that update the critic only."""
    resume_mode: str
    """auto: from the newest checkpoint in default_local_dir; disable: never; or a global_step_N folder."""
    log_rollouts: bool
    """Write every sample to rollouts/ in default_local_dir."""
    default_hdfs_dir: str | None
    """Remote folder for copies of the checkpoints; null: none."""
    default_local_dir: str
    """Run folder: checkpoints, metrics, samples, resolved config."""
