"""Keys under `algorithm`: advantages, and the KL penalty in the reward."""

from __future__ import annotations

from typing import Literal

from strop.config.schema.base import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Section
from strop.config.schema.shared import KlKind


class KlControlConfig(Section):
    """The weight of the KL penalty in the reward; unused with actor_rollout_ref.actor.use_kl_loss."""

    type: Literal["fixed", "adaptive"]
    """fixed: kl_coef throughout; adaptive: steered so that the KL stays near target_kl."""
    kl_coef: NonNegativeFloat
    """Weight of the penalty (its first value, when adaptive); 0: off."""
    horizon: PositiveInt
    """Samples over which the adaptive weight reacts."""
    target_kl: PositiveFloat
    """KL that the adaptive weight steers to."""


class AlgorithmConfig(Section):
    """From scores to advantages."""

    gamma: Fraction
    """Discount factor per token."""
    lam: Fraction
    """GAE's trade-off between bias and variance."""
    adv_estimator: str
    """gae, grpo, rloo, remax, reinforce_plus_plus, reinforce_plus_plus_baseline, or an import path."""
    whiten_advantages: bool
    """Scale GAE's advantages to mean 0 and variance 1 over the batch."""
    norm_adv_by_std_in_grpo: bool
    """Divide GRPO's advantages by the group's standard deviation; False: Dr. GRPO."""
    kl_penalty: KlKind
    """Estimator of the KL between policy and reference in the reward."""
    kl_ctrl: KlControlConfig
