"""The roots of the configuration trees: what they share, and that of reinforcement learning."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import PrivateAttr

from strop.config.schema.base import Fraction, KlKind, NonNegativeFloat, PositiveFloat, PositiveInt, Section
from strop.config.schema.critic import CriticConfig
from strop.config.schema.data import DataConfig, RowsConfig
from strop.config.schema.policy import ActorRolloutRefConfig
from strop.config.schema.reward import CustomRewardFunctionConfig, RewardModelConfig
from strop.config.schema.trainer import RunConfig, TrainerConfig

# Keys under `algorithm`: advantages, and the KL penalty in the reward.


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


class RootConfig(Section):
    """Everything that a run of any kind is told, read by attribute: config.trainer.total_epochs."""

    data: RowsConfig
    trainer: RunConfig

    _written: frozenset[str] | None = PrivateAttr(default=None)
    _overridden: frozenset[str] = PrivateAttr(default=frozenset())

    @property
    def written(self) -> frozenset[str] | None:
        """Full paths of the keys that a file or an override wrote; None when that is not known."""
        return self._written

    @property
    def overridden(self) -> frozenset[str]:
        """Those that an override wrote: what is typed is meant, and a file may be a copy of another."""
        return self._overridden

    def note_written(self, paths: Iterable[str], *, overridden: Iterable[str] | None = None) -> None:
        """Keep which keys the user wrote: what stands on its default is not worth a warning."""
        self._written = frozenset(paths)
        if overridden is not None:
            self._overridden = frozenset(overridden)

    def __eq__(self, other: object) -> bool:
        """Equal values; who wrote them does not matter."""
        return type(other) is type(self) and self.model_dump() == other.model_dump()

    __hash__ = None


class Config(RootConfig):
    """Everything that a run of reinforcement learning is told."""

    data: DataConfig
    actor_rollout_ref: ActorRolloutRefConfig
    critic: CriticConfig
    reward_model: RewardModelConfig
    custom_reward_function: CustomRewardFunctionConfig
    algorithm: AlgorithmConfig
    trainer: TrainerConfig
