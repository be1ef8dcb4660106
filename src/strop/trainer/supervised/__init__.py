"""Supervised trainers: on responses (``sft``), and on pairs of responses (``reward_model``)."""

from __future__ import annotations

from strop.config.schema.supervised import RewardModellingConfig, SftConfig, SupervisedConfig
from strop.trainer.supervised.base import SupervisedTrainer, build
from strop.trainer.supervised.reward_model import RewardModelTrainer
from strop.trainer.supervised.sft import SftTrainer

TRAINERS: dict[type[SupervisedConfig], type[SupervisedTrainer]] = {
    SftConfig: SftTrainer,
    RewardModellingConfig: RewardModelTrainer,
}
"""Kind of configuration -> its trainer."""

__all__ = ["TRAINERS", "RewardModelTrainer", "SftTrainer", "SupervisedTrainer", "build"]
