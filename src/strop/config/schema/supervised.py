"""The trees of the supervised trainers: fine-tuning on responses, and reward modelling on pairs of them."""

from __future__ import annotations

from typing import Literal

from strop.config.schema.base import (
    FsdpConfig,
    ModelConfig,
    NonNegativeFloat,
    OptimConfig,
    PositiveFloat,
    PositiveInt,
    Section,
    Strategy,
)
from strop.config.schema.data import RowsConfig
from strop.config.schema.root import RootConfig
from strop.config.schema.trainer import RunConfig


class AnsweredDataConfig(RowsConfig):
    """Prompts with their answers, for training and validation."""

    train_batch_size: PositiveInt
    """Rows in one optimizer step, over all processes."""
    truncation: Literal["error", "left", "right", "middle"]
    """What to do with rows that are too long: stop, or cut the prompt there; answers lose their end."""
    filter_overlong: bool
    """Drop rows with a prompt or an answer over its limit when the files are read, and say how many."""


class SftDataConfig(AnsweredDataConfig):
    """Prompts with a response each."""

    response_key: str
    """Column that holds the response, a string."""


class PairDataConfig(AnsweredDataConfig):
    """Prompts with two answers, of which one was preferred."""

    chosen_key: str
    """Column that holds the preferred answer, a string."""
    rejected_key: str
    """Column that holds the other answer, a string."""


class TrainedModelConfig(ModelConfig):
    """The model that is trained."""

    fsdp_config: FsdpConfig


class UpdateConfig(Section):
    """The update: one optimizer step an iteration."""

    strategy: Strategy
    """Training back-end."""
    micro_batch_size_per_gpu: PositiveInt | None
    """Rows in one pass, per rank; memory only: it never changes a number."""
    use_dynamic_bsz: bool
    """Cut micro-batches by tokens (max_token_len_per_gpu) instead of by rows."""
    max_token_len_per_gpu: PositiveInt
    """Most tokens in one pass, per rank, with use_dynamic_bsz; at least one whole row."""
    grad_clip: PositiveFloat
    """Largest global norm of the gradient; above it, the gradient is scaled down."""
    optim: OptimConfig


class RewardUpdateConfig(UpdateConfig):
    """The update: one optimizer step an iteration."""

    center_rewards_coefficient: NonNegativeFloat
    """Weight of the mean of (chosen + rejected score)^2, which holds scores near 0; 0: off."""


class SupervisedConfig(RootConfig):
    """Everything that a supervised run is told."""

    data: AnsweredDataConfig
    model: TrainedModelConfig
    update: UpdateConfig
    trainer: RunConfig


class SftConfig(SupervisedConfig):
    """Everything that supervised fine-tuning is told."""

    data: SftDataConfig


class RewardModellingConfig(SupervisedConfig):
    """Everything that reward modelling is told."""

    data: PairDataConfig
    update: RewardUpdateConfig
