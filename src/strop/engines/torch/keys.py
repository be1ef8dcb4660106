"""Keys of the sections ``fsdp_config``: sharding and memory of a model on plain torch and FSDP2."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from strop.config.schema.base import (
    LARGEST_SIZE,
    MAY_CHANGE,
    Integer,
    Offload,
    PositiveOrAll,
    Section,
    no_effect,
)

_UNSHARDED = no_effect(
    "with one process for each role",
    lambda at: at.value not in (-1, 0, 1) and at.one_rank,
    "one process holds the whole model",
)

UnitSize = Annotated[Integer, Field(ge=0, le=LARGEST_SIZE), _UNSHARDED]


class WrapPolicyConfig(Section, resumes=MAY_CHANGE):
    """Modules that are sharded as one unit."""

    transformer_layer_cls_to_wrap: Annotated[str | list[str] | None, _UNSHARDED]
    """Layer classes to shard as units; null: the model's own decoder layers."""
    min_num_params: UnitSize
    """Shard modules of at least this many parameters as units; 0: by decoder layer."""


Reshard = Annotated[
    bool,
    no_effect(
        "with one process for each role",
        lambda at: not at.value and at.one_rank,
        "one process holds the whole model",
    ),
]


class FrozenFsdpConfig(Section, resumes=MAY_CHANGE):
    """Sharding of a model that is only evaluated."""

    wrap_policy: WrapPolicyConfig
    reshard_after_forward: Reshard
    """Free gathered parameters after a layer's forward pass; False: keep them for the backward pass."""
    param_offload: Offload
    """Keep the parameters in CPU memory while they are not used."""


class FsdpConfig(FrozenFsdpConfig):
    """Sharding of a model that is trained."""

    grad_offload: Annotated[
        bool,
        no_effect(
            "in any run",
            lambda at: at.value,
            # The optimizer step sets the gradients to None, so there are none between phases.
            "gradients live only from an update's backward passes to its step",
        ),
    ]
    """Keep the gradients in CPU memory while they are not used."""
    optimizer_offload: Offload
    """Keep the optimizer state in CPU memory; in a step it passes through the GPU, 0.5 GiB at a time."""
    fsdp_size: Annotated[PositiveOrAll, _UNSHARDED]
    """Ranks that share one copy of the parameters; -1: all."""
    use_no_sync_for_gradient_accumulation: Annotated[
        bool | None,
        no_effect(
            "with one process for each role",
            lambda at: at.value and at.one_rank,
            "there is nothing to reduce",
        ),
    ]
    """Keep whole gradients and reduce them once a step, not in every micro-batch; null: if they fit."""


class RewardFsdpConfig(Section, resumes=MAY_CHANGE):
    """Sharding of the reward model."""

    min_num_params: UnitSize
    """Shard modules of at least this many parameters as units; 0: by decoder layer."""
    param_offload: Offload
    """Keep the parameters in CPU memory while they are not used."""
    reshard_after_forward: Reshard
    """Free gathered parameters after a layer's forward pass; False: when all micro-batches are done."""


SECTION = "fsdp_config"
SECTIONS = {
    "actor_rollout_ref.actor": FsdpConfig,
    "actor_rollout_ref.ref": FrozenFsdpConfig,
    "critic.model": FsdpConfig,
    "reward_model.model": RewardFsdpConfig,
    "teacher.model": FrozenFsdpConfig,
    "model": FsdpConfig,
}
"""Section of the configuration that has one -> its class."""
