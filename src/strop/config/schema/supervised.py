"""The trees of supervised training: on responses (sft), and on pairs of answers (train-rm, dpo)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from strop.config.names import preference_losses
from strop.config.schema.base import (
    MAY_CHANGE,
    Limit,
    NonNegativeFloat,
    Number,
    OptimConfig,
    PositiveFloat,
    PositiveInt,
    Section,
    Strategy,
    Text,
    by_rows,
    by_tokens,
    engine_sections,
    needs,
    no_effect,
)
from strop.config.schema.data import RowsConfig
from strop.config.schema.model import ModelConfig
from strop.config.schema.root import RootConfig
from strop.config.schema.teacher import NO_TEACHER, SftTeacherConfig
from strop.config.schema.trainer import PairRunConfig, RunConfig


class AnsweredDataConfig(RowsConfig):
    """Prompts with their answers, for training and validation."""

    truncation: Annotated[Literal["error", "left", "right", "middle"], MAY_CHANGE]
    """Treatment of rows that are too long: stop, or cut the prompt on that side; answers lose their end."""
    filter_overlong: Annotated[bool, MAY_CHANGE]
    """Drop rows with a prompt or an answer over its limit, and log how many; False: see data.truncation."""


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


@engine_sections("model")
class TrainedModelConfig(ModelConfig):
    """The model that is trained."""


class UpdateConfig(Section, resumes=MAY_CHANGE):
    """The update: one optimizer step per iteration."""

    strategy: Annotated[Strategy, needs("supervised")]
    """Training back-end."""
    micro_batch_size_per_gpu: Annotated[PositiveInt | None, by_rows()]
    """Rows in one pass, per rank; it changes results by rounding only."""
    use_dynamic_bsz: bool
    """Cut micro-batches by tokens, not by rows; if not set: unless a size in rows is set."""
    max_token_len_per_gpu: Annotated[PositiveInt | None, by_tokens()]
    """Most tokens in one pass, per rank, with use_dynamic_bsz; null: chosen from the memory."""
    grad_clip: PositiveFloat
    """Largest global norm of the gradient; above it, the gradient is scaled down."""
    optim: OptimConfig


class SftUpdateConfig(UpdateConfig):
    """The update: one optimizer step per iteration."""

    nll_coef: Annotated[NonNegativeFloat, NO_TEACHER]
    """Weight in the loss of the answers' own negative log-likelihood, with a teacher; 0: off."""


class RewardUpdateConfig(UpdateConfig):
    """The update: one optimizer step per iteration."""

    center_rewards_coefficient: NonNegativeFloat
    """Weight of the mean of (chosen + rejected score)^2, which keeps scores near 0; 0: off."""


def _setting(name: str) -> Limit:
    """Mark a key that is a setting of preference losses; only built-in ones have known parameters."""
    without = [loss for loss, parameters in preference_losses().items() if name not in parameters]
    return no_effect(
        f"with update.loss {', '.join(without)}",
        lambda at: at.value is not None and at.section.loss in without,
    )


class PreferenceUpdateConfig(UpdateConfig):
    """The update: one optimizer step per iteration."""

    loss: Text
    """Loss of a pair: dpo, cdpo, ipo, hinge, simpo, orpo, or an import path (strop docs preference)."""
    beta: PositiveFloat | None
    """Weight of log-probs in the reward (ipo: tau; orpo: lambda); null: 0.1, with simpo 2.0."""
    label_smoothing: Annotated[Number | None, Field(ge=0, lt=0.5), _setting("label_smoothing")]
    """Share of pairs assumed to be labelled the wrong way round; null: 0, with cdpo 0.1."""
    gamma: Annotated[NonNegativeFloat | None, _setting("gamma")]
    """Margin by which simpo's rewards should differ; null: 1."""
    loss_kwargs: dict[str, Any]
    """Further settings of a loss of your own, by parameter name."""
    nll_coef: NonNegativeFloat
    """Weight in the loss of the chosen answers' negative log-likelihood, a mean over tokens (RPO); 0: off."""


class SupervisedConfig(RootConfig):
    """The whole configuration of a supervised run."""

    data: AnsweredDataConfig
    model: TrainedModelConfig
    update: UpdateConfig
    trainer: RunConfig

    def strategy_key(self, path: str) -> str:
        return "update.strategy"


class SftConfig(SupervisedConfig):
    """The whole configuration of supervised fine-tuning."""

    data: SftDataConfig
    update: SftUpdateConfig
    teacher: SftTeacherConfig

    @property
    def trained_model(self) -> ModelConfig:
        """The section of the model that a teacher teaches."""
        return self.model


class PairConfig(SupervisedConfig):
    """The whole configuration of a run on pairs of answers."""

    data: PairDataConfig
    trainer: PairRunConfig


class RewardModellingConfig(PairConfig):
    """The whole configuration of reward modelling."""

    update: RewardUpdateConfig


class PreferenceConfig(PairConfig):
    """The whole configuration of preference optimization."""

    update: PreferenceUpdateConfig
