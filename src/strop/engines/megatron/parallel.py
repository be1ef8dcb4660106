"""Process groups of megatron-core, which are global to a process: all roles in it have one layout."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as parallel_random

from strop.engines.device import require_gpu
from strop.engines.megatron.settings import ParallelSettings
from strop.errors import ConfigError

_MINUTES = 7 * 24 * 60
"""A rank may write files while its neighbour waits in a collective; the controller detects hangs."""

_opened: tuple[Any, tuple[int, ...]] | None = None
"""The default group and the sizes with which groups were opened."""


def open_groups(settings: ParallelSettings, device: torch.device) -> None:
    """Open groups over the default process group, or over this process alone. Collective.

    Raises ``ConfigError`` if another role of this process has opened others.
    """
    global _opened
    require_gpu("megatron")
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        # one process without a group: a store in its memory needs no port
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    sizes = (settings.tensor, settings.pipeline, settings.virtual or 0, settings.expert)
    if _opened is not None and _opened[0] is dist.group.WORLD:
        if _opened[1] != sizes:
            names = "tensor, pipeline, virtual pipeline and expert"
            raise ConfigError(
                f"two models in one process have the {names} sizes {_opened[1]} and {sizes}; megatron-core "
                "has one layout in a process: give all roles of a pool the same sizes"
            )
        return
    if parallel_state.is_initialized():  # of an earlier default group
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=settings.tensor,
        pipeline_model_parallel_size=settings.pipeline,
        virtual_pipeline_model_parallel_size=settings.virtual,
        expert_model_parallel_size=settings.expert,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=_MINUTES,
    )
    # No layer draws random numbers, so ranks need no separate generators.
    parallel_random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    _opened = (dist.group.WORLD, sizes)


def from_last_stage(value: Any) -> Any:
    """Return the ``value`` of the last pipeline stage, on every stage. Collective."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return value
    box = [value]
    group = parallel_state.get_pipeline_model_parallel_group()
    dist.broadcast_object_list(box, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return box[0]
