"""What a worker tells an engine about optimizer, sharding and memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and gradient clipping by global norm."""

    betas: tuple[float, float]
    weight_decay: float
    eps: float
    grad_clip: float


@dataclass(frozen=True)
class ShardingSettings:
    """Which modules are units, and how many ranks share one copy of the parameters, or one sequence."""

    layer_classes: tuple[str, ...] = ()
    """Names of the classes to shard as units; none: the model's own decoder layers."""
    min_num_params: int = 0
    """Instead, units of at least this many parameters; 0: by class."""
    fsdp_size: int = -1
    """Ranks that share one copy; -1: all. 1: every rank has its own."""
    sequence_parallel_size: int = 1
    """Neighbouring ranks that get the same batches and run passes over them together."""


@dataclass(frozen=True)
class OffloadSettings:
    """What waits in CPU memory; on a CPU nothing moves."""

    parameters: bool = False
    optimizer: bool = False
