"""Supervised trainers: on responses (``sft``), and on pairs of responses (``reward_model``,
``preference``).
"""

from __future__ import annotations

from strop.config.schema.supervised import (
    PreferenceConfig,
    RewardModellingConfig,
    SftConfig,
    SupervisedConfig,
)
from strop.trainer.supervised.base import SupervisedTrainer, build
from strop.trainer.supervised.preference import PreferenceTrainer
from strop.trainer.supervised.reward_model import RewardModelTrainer
from strop.trainer.supervised.sft import SftTrainer

TRAINERS: dict[type[SupervisedConfig], type[SupervisedTrainer]] = {
    SftConfig: SftTrainer,
    RewardModellingConfig: RewardModelTrainer,
    PreferenceConfig: PreferenceTrainer,
}
"""Kind of configuration -> its trainer."""

__all__ = ["TRAINERS", "PreferenceTrainer", "RewardModelTrainer", "SftTrainer", "SupervisedTrainer", "build"]
