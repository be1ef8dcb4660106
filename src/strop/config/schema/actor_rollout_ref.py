"""Keys under `actor_rollout_ref`: the policy's model, and the reference model that is its frozen copy."""

from __future__ import annotations

from strop.config.schema.actor import ActorConfig
from strop.config.schema.base import PositiveInt, Section
from strop.config.schema.rollout import RolloutConfig
from strop.config.schema.shared import FrozenFsdpConfig, ModelConfig


class ActorModelConfig(ModelConfig):
    """The model that is trained, and that the reference model is a frozen copy of."""

    external_libs: str | list[str] | None
    """Deprecated name of external_lib."""


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
