"""The roots of the configuration trees: the common base, and the tree of reinforcement learning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Annotated, Literal

from pydantic import PrivateAttr

from strop.config.names import estimators
from strop.config.schema.agent import AgentConfig
from strop.config.schema.base import (
    MAY_CHANGE,
    At,
    Count,
    Fraction,
    KlKind,
    Limit,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
    Text,
    needs,
    no_effect,
)
from strop.config.schema.critic import NO_CRITIC, CriticConfig
from strop.config.schema.data import DataConfig, RowsConfig
from strop.config.schema.environment import EnvironmentConfig
from strop.config.schema.model import ModelConfig
from strop.config.schema.policy import ActorRolloutRefConfig, has_kl_term
from strop.config.schema.reward import CustomRewardFunctionConfig, RewardModelConfig
from strop.config.schema.teacher import TeacherConfig
from strop.config.schema.trainer import RunConfig, TrainerConfig


def _steers_no_kl(at: At) -> bool:
    control = at.config.algorithm.kl_ctrl
    return control.type == "fixed" or control.kl_coef == 0 or at.config.actor_rollout_ref.actor.use_kl_loss


_NO_STEERING = no_effect("without an adaptive KL in the reward", _steers_no_kl)


class KlControlConfig(Section, resumes=MAY_CHANGE):
    """The weight of the KL penalty in the reward; unused with actor_rollout_ref.actor.use_kl_loss."""

    type: Annotated[
        Literal["fixed", "adaptive"],
        no_effect(
            "without a KL in the reward",
            lambda at: at.value == "adaptive" and _steers_no_kl(at),
            "kl_coef is 0, or use_kl_loss puts the KL into the loss with the fixed weight kl_loss_coef",
        ),
    ]
    """fixed: kl_coef throughout; adaptive: steered so that the KL stays near target_kl."""
    kl_coef: Annotated[
        NonNegativeFloat,
        no_effect(
            "with actor_rollout_ref.actor.use_kl_loss=True",
            lambda at: at.value != 0 and at.config.actor_rollout_ref.actor.use_kl_loss,
            "the KL is in the loss",
        ),
    ]
    """Weight of the penalty (its first value, when adaptive); 0: off."""
    horizon: Annotated[PositiveInt, _NO_STEERING]
    """Samples over which the adaptive weight reacts."""
    target_kl: Annotated[PositiveFloat, _NO_STEERING]
    """KL that the adaptive weight steers to."""


def _argument(name: str, *, neutral: float) -> Limit:
    """Mark a key that is the argument ``name`` of estimators; only built-in ones have known parameters."""
    without = [estimator for estimator, parameters in estimators().items() if name not in parameters]
    return no_effect(
        f"with algorithm.adv_estimator {', '.join(without)}",
        lambda at: at.section.adv_estimator in without and at.value != neutral,
    )


_NO_FILTER = no_effect("with algorithm.filter_groups.enable=False", lambda at: not at.section.enable)


class FilterGroupsConfig(Section, resumes=MAY_CHANGE):
    """Dynamic sampling (DAPO): train on prompts whose answers differ, and generate until there are enough."""

    enable: bool
    """Drop prompts whose answers all have one score, and generate further batches in their place."""
    metric: Annotated[Text, _NO_FILTER]
    """Value that must differ: score, acc (the rule's part), or another part of the score."""
    max_num_gen_batches: Annotated[Count, _NO_FILTER]
    """End the run with an error if an iteration would need more batches than this; 0: no limit."""


class AlgorithmConfig(Section, resumes=MAY_CHANGE):
    """From scores to advantages."""

    gamma: Annotated[Fraction, _argument("gamma", neutral=1.0)]
    """Discount factor per token."""
    lam: Annotated[Fraction, _argument("lam", neutral=1.0)]
    """GAE's trade-off between bias and variance."""
    adv_estimator: str
    """gae, grpo, rloo, remax, turn_level, reinforce_plus_plus, reinforce_plus_plus_baseline, or yours."""
    whiten_advantages: Annotated[bool, _argument("whiten", neutral=False)]
    """Scale GAE's advantages to mean 0 and variance 1 over the batch."""
    norm_adv_by_std_in_grpo: Annotated[bool, _argument("norm_by_std", neutral=False)]
    """Divide GRPO's advantages by the group's standard deviation; False: Dr. GRPO."""
    kl_penalty: Annotated[
        KlKind,
        no_effect("without a KL term", lambda at: not has_kl_term(at.config), "no reference model is loaded"),
        needs(
            "whole_logits", lambda at: at.value == "full" and not at.config.trainer.val_only, when="if full"
        ),
    ]
    """Estimator of the KL between policy and reference in the reward and in metrics."""
    kl_ctrl: KlControlConfig
    filter_groups: FilterGroupsConfig


class RootConfig(Section):
    """The whole configuration of a run of any kind; values are attributes: config.trainer.total_epochs."""

    data: RowsConfig
    trainer: RunConfig

    _written: frozenset[str] | None = PrivateAttr(default=None)
    _meant: frozenset[str] = PrivateAttr(default=frozenset())
    _notes: tuple[str, ...] = PrivateAttr(default=())
    _authors: dict[str, str] = PrivateAttr(default_factory=dict)
    _gpus: int | None = PrivateAttr(default=None)

    @property
    def written(self) -> frozenset[str] | None:
        """Full paths of the keys that a file or an override wrote; None if that is not known."""
        return self._written

    @property
    def meant(self) -> frozenset[str]:
        """Written keys that somebody may count on: overrides, and values in a file that are no defaults.

        A file may be a copy of another one with all its defaults.
        """
        return self._meant

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on what was read otherwise than it was written: keys of verl."""
        return self._notes

    def author(self, path: str) -> str:
        """Return who decided the value of a key, and of the keys in a mapping; "" for the default."""
        found = (name for key, name in self._authors.items() if f"{key}.".startswith(f"{path}."))
        return ", ".join(dict.fromkeys(found))

    def note_authors(self, authors: Mapping[str, str]) -> None:
        """Record the authors of values that are no defaults."""
        self._authors = dict(authors)

    @property
    def gpus(self) -> int | None:
        """GPUs of the process that loaded this; a process of Ray sees its own only. None: not known."""
        return self._gpus

    def note_gpus(self, gpus: int) -> None:
        """Record the GPUs on which a default depends, which so is one for all processes of a run."""
        self._gpus = gpus

    def strategy_key(self, path: str) -> str:
        """Return the key of the strategy of the model that the key ``path`` belongs to."""
        raise NotImplementedError

    def strategy_of(self, path: str) -> str:
        """Return the strategy of the model that the key ``path`` belongs to."""
        return attrgetter(self.strategy_key(path))(self)

    def note_written(self, paths: Iterable[str], *, meant: Iterable[str], notes: Iterable[str] = ()) -> None:
        """Record which keys the user wrote: an unwritten default is not worth a warning."""
        self._written, self._meant, self._notes = frozenset(paths), frozenset(meant), tuple(notes)

    def __eq__(self, other: object) -> bool:
        """Compare values; who wrote them does not matter."""
        return type(other) is type(self) and self.model_dump() == other.model_dump()

    __hash__ = None


class Config(RootConfig):
    """The whole configuration of reinforcement learning."""

    data: DataConfig
    actor_rollout_ref: ActorRolloutRefConfig
    critic: Annotated[CriticConfig, NO_CRITIC]
    reward_model: RewardModelConfig
    custom_reward_function: CustomRewardFunctionConfig
    teacher: TeacherConfig
    environment: EnvironmentConfig
    agent: AgentConfig
    algorithm: AlgorithmConfig
    trainer: TrainerConfig

    @property
    def trained_model(self) -> ModelConfig:
        """The section of the model that a teacher teaches."""
        return self.actor_rollout_ref.model

    def strategy_key(self, path: str) -> str:
        """See ``RootConfig.strategy_key``; reference and reward model have that of the actor."""
        return "critic.strategy" if path.startswith("critic.") else "actor_rollout_ref.actor.strategy"
