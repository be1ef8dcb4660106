"""Keys under `actor_rollout_ref`: the policy's model, and the reference model that is its frozen copy."""

from __future__ import annotations

from typing import Any

from strop.config.schema.actor import ActorConfig
from strop.config.schema.base import PositiveInt, Section
from strop.config.schema.rollout import RolloutConfig
from strop.config.schema.shared import AttentionName, ComputeDtype, FrozenFsdpConfig


class ActorModelConfig(Section):
    """The model that is trained, and that the reference model is a frozen copy of."""

    path: str
    """Hugging Face model: folder, name, hdfs:// or any fsspec URL, or a GGUF file."""
    external_lib: str | list[str] | None
    """Package, or list of packages, to import first: they register models or tokenizers with transformers."""
    external_libs: str | list[str] | None
    """Deprecated name of external_lib."""
    override_config: dict[str, Any]
    """Values laid over the model's config.json, for example a dropout rate."""
    enable_gradient_checkpointing: bool
    """Recompute activations in the backward pass: less memory, about a third more time."""
    use_remove_padding: bool
    """Pack sequences without padding: the same numbers in less time."""
    trust_remote_code: bool
    """Run Python code that comes with the model."""
    attn_implementation: AttentionName | None
    """Attention kernel of transformers; null: its own choice."""
    compute_dtype: ComputeDtype
    """Precision of the passes; auto: bfloat16 on a GPU, float32 on a CPU. Weights stay float32."""


class RefConfig(Section):
    """The reference model; it is loaded only when a KL term is on."""

    fsdp_config: FrozenFsdpConfig
    log_prob_micro_batch_size: PositiveInt | None
    """Deprecated: log_prob_micro_batch_size_per_gpu times the number of ranks."""
    log_prob_micro_batch_size_per_gpu: PositiveInt | None
    """Sequences in one forward pass for the reference log-probs, per rank; memory only."""
    log_prob_use_dynamic_bsz: bool
    """Cut micro-batches by tokens (log_prob_max_token_len_per_gpu) instead of by sequences."""
    log_prob_max_token_len_per_gpu: PositiveInt
    """Most tokens in one forward pass, per rank, with log_prob_use_dynamic_bsz."""
    ulysses_sequence_parallel_size: PositiveInt
    """Neighbouring ranks that share each sequence; needs use_remove_padding."""


class ActorRolloutRefConfig(Section):
    """The policy: how it is trained (actor), how it answers (rollout), and what it is held to (ref)."""

    hybrid_engine: bool
    """Actor and rollout live in the same processes; the only arrangement so far."""
    model: ActorModelConfig
    actor: ActorConfig
    ref: RefConfig
    rollout: RolloutConfig
