"""Keys under `actor_rollout_ref.actor`: the policy update."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from strop.config.schema.base import Fraction, NonNegativeFloat, Number, PositiveFloat, PositiveInt, Section
from strop.config.schema.shared import FsdpConfig, KlKind, LossAggregation, OptimConfig, Strategy


class ActorConfig(Section):
    """The policy update."""

    strategy: Strategy
    """Training back-end."""
    ppo_mini_batch_size: PositiveInt
    """Prompts in one optimizer step, over all ranks: ppo_mini_batch_size x rollout.n samples."""
    ppo_micro_batch_size: PositiveInt | None
    """Deprecated: ppo_micro_batch_size_per_gpu times the number of ranks."""
    ppo_micro_batch_size_per_gpu: PositiveInt | None
    """Sequences in one forward and backward pass, per rank; memory only: it never changes a number."""
    use_dynamic_bsz: bool
    """Cut micro-batches by tokens (ppo_max_token_len_per_gpu) instead of by sequences."""
    ppo_max_token_len_per_gpu: PositiveInt
    """Most tokens in one pass, per rank, with use_dynamic_bsz; at least one whole prompt and response."""
    grad_clip: PositiveFloat
    """Largest global norm of the gradient; above it, the gradient is scaled down."""
    clip_ratio: Fraction
    """PPO's clip range of the probability ratio, on both sides."""
    clip_ratio_low: Fraction | None
    """Clip range below 1; null: clip_ratio."""
    clip_ratio_high: NonNegativeFloat | None
    """Clip range above 1; null: clip_ratio."""
    clip_ratio_c: Annotated[Number, Field(gt=1)] | None
    """Dual clip: bound of the loss at -A x this where the advantage A is negative; null: off."""
    loss_agg_mode: LossAggregation
    """How token losses become one number; denominators count the whole mini-batch over all ranks."""
    policy_loss: str
    """ppo, gspo, cispo, or the import path of your own."""
    entropy_coeff: NonNegativeFloat
    """Weight of the entropy bonus."""
    use_kl_loss: bool
    """Put the KL to the reference model into the loss instead of the reward (usual for GRPO)."""
    kl_loss_coef: NonNegativeFloat
    """Weight of that KL loss; unused without use_kl_loss."""
    kl_loss_type: KlKind
    """Estimator of that KL; unused without use_kl_loss."""
    rollout_is: Literal["token", "sequence"] | None
    """Weigh the loss by trainer over sampler probability, per token or per sequence; null: off."""
    rollout_is_threshold: PositiveFloat
    """Those weights are cut off above this."""
    ppo_epochs: PositiveInt
    """Passes over the samples of one iteration."""
    shuffle: bool
    """Draw the mini-batches in a new seeded order every pass."""
    old_log_prob_from_update: bool
    """One step an iteration: old log-probs from its own forward pass, if possible; False: from one before."""
    ulysses_sequence_parallel_size: PositiveInt
    """Neighbouring ranks that share each sequence, in updates and log-probs; needs use_remove_padding."""
    optim: OptimConfig
    fsdp_config: FsdpConfig
