"""``ParallelSettings``: a section ``megatron``, and the place of a rank in its layout.

Ranks are laid out as megatron-core does by default: neighbours share tensors, then data-parallel copies
follow, then pipeline stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from strop.errors import ConfigError

FAMILIES = ("llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Model types, entries of config.json, that the engine has layers for."""


def with_choices(
    key: str, decided: Mapping[str, Any], defaults: Mapping[str, Any], chosen: Mapping[str, Any]
) -> dict[str, Any]:
    """Lay the entries ``chosen`` in the section ``key`` over ``defaults``.

    Raises ``ConfigError`` for one that contradicts an entry in ``decided``: numbers would be wrong.
    """
    if wrong := [name for name, value in chosen.items() if name in decided and decided[name] != value]:
        raise ConfigError(
            f"megatron.{key}.{wrong[0]}={chosen[wrong[0]]}: this engine needs {decided[wrong[0]]} for this "
            "model, these other keys, or its way to compute; leave the entry out"
        )
    return {**decided, **defaults, **chosen}


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """Layout of a model over the ranks of its worker group."""

    tensor: int = 1
    """Ranks that share every layer."""
    pipeline: int = 1
    """Stages of layers."""
    virtual: int | None = None
    """Model chunks of each stage (interleaved schedule); None: one."""
    expert: int = 1
    """Ranks that share the experts of every layer, each with whole ones."""
    sequence_parallel: bool = True
    """Ranks that share layers also share the tokens between them; without effect for ``tensor`` = 1."""
    distributed_optimizer: bool = True
    """Data-parallel ranks share the optimizer state."""
    transformer: Mapping[str, Any] = field(default_factory=dict)
    """Entries laid over megatron-core's ``TransformerConfig``."""
    ddp: Mapping[str, Any] = field(default_factory=dict)
    """Entries laid over megatron-core's ``DistributedDataParallelConfig``."""

    @classmethod
    def from_section(cls, section: Any) -> ParallelSettings:
        """Read a section ``megatron``."""
        chosen = {
            key: value for key, value in section.override_transformer_config.items() if value is not None
        }
        return cls(
            tensor=section.tensor_model_parallel_size,
            pipeline=section.pipeline_model_parallel_size,
            virtual=section.virtual_pipeline_model_parallel_size,
            expert=section.expert_model_parallel_size,
            sequence_parallel=section.sequence_parallel,
            distributed_optimizer=section.use_distributed_optimizer,
            transformer=chosen,
            ddp=section.override_ddp_config,
        )

    @property
    def model_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor * self.pipeline

    def data_parallel_place(self, rank: int, world_size: int) -> tuple[int, int]:
        """Return the data-parallel rank of ``rank``, and the number of copies of the model.

        The preflight check requires that copies, and ranks that share experts, divide the ranks.
        """
        copies = world_size // self.model_size
        return rank // self.tensor % copies, copies
