"""The trees of supervised training: fine-tuning on responses, and reward modelling on pairs of answers."""

from __future__ import annotations

from typing import Annotated, Literal

from strop.config.schema.base import (
    FsdpConfig,
    ModelConfig,
    NonNegativeFloat,
    OptimConfig,
    PositiveFloat,
    PositiveInt,
    Section,
    SupervisedStrategy,
    Text,
    by_rows,
    by_tokens,
)
from strop.config.schema.data import RowsConfig
from strop.config.schema.root import RootConfig
from strop.config.schema.trainer import RunConfig


class AnsweredDataConfig(RowsConfig):
    """Prompts with their answers, for training and validation."""

    truncation: Literal["error", "left", "right", "middle"]
    """Treatment of rows that are too long: stop, or cut the prompt on that side; answers lose their end."""
    filter_overlong: bool
    """Drop rows with a prompt or an answer over its limit when the files are read, and log how many."""


class SftDataConfig(AnsweredDataConfig):
    """Prompts with a response each."""

    response_key: Text
    """Column that holds the response, a string."""


class PairDataConfig(AnsweredDataConfig):
    """Prompts with two answers, one of them preferred."""

    chosen_key: Text
    """Column that holds the preferred answer, a string."""
    rejected_key: Text
    """Column that holds the other answer, a string."""


class TrainedModelConfig(ModelConfig):
    """The model that is trained."""

    fsdp_config: FsdpConfig


class UpdateConfig(Section):
    """The update: one optimizer step per iteration."""

    strategy: SupervisedStrategy
    """Training back-end."""
    micro_batch_size_per_gpu: Annotated[PositiveInt | None, by_rows()]
    """Rows in one pass, per rank; memory only: it never changes a number."""
    use_dynamic_bsz: bool
    """Cut micro-batches by tokens (max_token_len_per_gpu) instead of by rows."""
    max_token_len_per_gpu: Annotated[PositiveInt, by_tokens()]
    """Most tokens in one pass, per rank, with use_dynamic_bsz; at least one whole row."""
    grad_clip: PositiveFloat
    """Largest global norm of the gradient; above it, the gradient is scaled down."""
    optim: OptimConfig


class RewardUpdateConfig(UpdateConfig):
    """The update: one optimizer step per iteration."""

    center_rewards_coefficient: NonNegativeFloat
    """Weight of the mean of (chosen + rejected score)^2, which keeps scores near 0; 0: off."""


class SupervisedConfig(RootConfig):
    """The whole configuration of a supervised run."""

    data: AnsweredDataConfig
    model: TrainedModelConfig
    update: UpdateConfig
    trainer: RunConfig


class SftConfig(SupervisedConfig):
    """The whole configuration of supervised fine-tuning."""

    data: SftDataConfig


class RewardModellingConfig(SupervisedConfig):
    """The whole configuration of reward modelling."""

    data: PairDataConfig
    update: RewardUpdateConfig
