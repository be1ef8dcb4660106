"""Keys of a section `megatron`: the layout of a model over ranks by megatron-core."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from strop.config.schema.base import MAY_CHANGE, PositiveInt, Section, Seed, no_effect, refused


def _unsupported(reason: str) -> Any:
    return refused(
        f"unless {reason.partition(':')[0]}",
        lambda at: at.value is True or at.value > 1,
        reason.partition(": ")[2],
    )


_NO_OFFLOAD = _unsupported("False: not supported; set it to False, or strategy=fsdp")

_NOTHING_TO_CHOOSE = no_effect("in any run", lambda at: bool(at.value), "verl's choice between loaders")


class MegatronConfig(Section, resumes=MAY_CHANGE):
    """Layout of a model with strategy=megatron; roles in one pool have the same."""

    tensor_model_parallel_size: PositiveInt = 1
    """Ranks that share every layer."""
    pipeline_model_parallel_size: PositiveInt = 1
    """Stages of layers, each on its own ranks."""
    virtual_pipeline_model_parallel_size: Annotated[
        PositiveInt | None,
        refused(
            "with pipeline_model_parallel_size=1",
            lambda at: at.value is not None and at.section.pipeline_model_parallel_size == 1,
            "one stage has nothing to interleave; set it to null",
        ),
        refused(
            "if 1",
            lambda at: at.value == 1,
            "an interleaved schedule has at least 2 model chunks on a stage; set it to null",
        ),
    ] = None
    """Model chunks on each stage, for the interleaved schedule; null: one."""
    context_parallel_size: Annotated[
        PositiveInt,
        _unsupported(
            "1: megatron-core shares sequences with Transformer Engine's attention, which is not used here; "
            "set it to 1, or strategy=fsdp with ulysses_sequence_parallel_size"
        ),
    ] = 1
    """Ranks that share each sequence."""
    expert_model_parallel_size: PositiveInt = 1
    """Ranks that share the routed experts of a layer; they are not more ranks, but take their own rows."""
    expert_tensor_parallel_size: Annotated[
        PositiveInt | None,
        _unsupported(
            "1 or null: ranks hold whole experts; set it to null, and share them by "
            "expert_model_parallel_size"
        ),
    ] = None
    """Ranks that share each expert; null: 1."""
    sequence_parallel: bool = True
    """Divide the tokens between layers over the ranks of tensor_model_parallel_size; without effect for 1."""
    use_distributed_optimizer: bool = True
    """Divide AdamW's moments over the data-parallel ranks."""
    param_offload: Annotated[bool, _NO_OFFLOAD] = False
    """Keep the parameters in CPU memory while they are not used."""
    grad_offload: Annotated[bool, _NO_OFFLOAD] = False
    """Keep the gradients in CPU memory while they are not used."""
    optimizer_offload: Annotated[bool, _NO_OFFLOAD] = False
    """Keep the optimizer state in CPU memory while it is not used."""
    use_dist_checkpointing: Annotated[
        bool,
        _unsupported(
            "False: models are read from Hugging Face folders, and checkpoints have one format for all "
            "engines; convert the weights, and set it to False"
        ),
    ] = False
    """Start from a checkpoint of Megatron-LM."""
    dist_checkpointing_path: Annotated[
        str | None, no_effect("in any run", lambda at: at.value is not None, "see use_dist_checkpointing")
    ] = None
    """Folder of that checkpoint."""
    use_mbridge: Annotated[bool, _NOTHING_TO_CHOOSE] = False
    """Convert weights by the package mbridge; strop has its own table."""
    override_transformer_config: dict[str, Any] = Field(default_factory=dict)
    """Entries of megatron-core's TransformerConfig, such as recompute_granularity; null ones are left out."""
    override_ddp_config: dict[str, Any] = Field(default_factory=dict)
    """Entries of megatron-core's DistributedDataParallelConfig."""
    seed: Annotated[
        Seed,
        no_effect("in any run", lambda at: at.value != 42, "no layer draws random numbers; see trainer.seed"),
    ] = 42
    """Seed of dropout."""


SECTION = "megatron"
SECTIONS = dict.fromkeys(
    ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic", "reward_model", "teacher"), MegatronConfig
)
"""Section of the configuration that has one -> its class; the others follow that of the actor."""
