"""The root of the configuration tree."""

from __future__ import annotations

from strop.config.schema.actor_rollout_ref import ActorRolloutRefConfig
from strop.config.schema.algorithm import AlgorithmConfig
from strop.config.schema.base import Section
from strop.config.schema.critic import CriticConfig
from strop.config.schema.data import DataConfig
from strop.config.schema.reward import CustomRewardFunctionConfig, RewardModelConfig
from strop.config.schema.trainer import TrainerConfig


class Config(Section):
    """Everything that a run is told, read by attribute: config.trainer.total_epochs."""

    data: DataConfig
    actor_rollout_ref: ActorRolloutRefConfig
    critic: CriticConfig
    reward_model: RewardModelConfig
    custom_reward_function: CustomRewardFunctionConfig
    algorithm: AlgorithmConfig
    trainer: TrainerConfig
