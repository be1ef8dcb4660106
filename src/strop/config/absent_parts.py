"""Limits on the keys of what a run does not have: a model that nothing asks for, a term that is off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from strop.config.keys import leaf_paths
from strop.config.limit import Limit
from strop.config.names import ESTIMATOR_TAKES, needs_critic
from strop.config.schema import Config

# What the reward model's keys follow, unless they are set themselves.
_ALSO_REWARD_MODEL = (
    "critic.use_dynamic_bsz",
    "critic.ppo_max_token_len_per_gpu",
    "critic.forward_max_token_len_per_gpu",
)


def _moot(
    *keys: str, when: str, applies: Callable[[Config, Any], bool], reason: str, unless: Any = None
) -> Limit:
    """A warning about keys of an absent part; the value `unless` says what happens anyway."""
    return Limit(
        keys=keys,
        when=when if unless is None else f"unless {unless}, {when}",
        applies=lambda config, value: value is not None and value != unless and applies(config, value),
        level="warning",
        reason=reason,
        explains=False,
        may_be_copied=True,
    )


def _has_no_critic(config: Config, _: Any) -> bool:
    return not needs_critic(config.algorithm.adv_estimator)


def _has_no_reference(config: Config, _: Any) -> bool:
    return not config.actor_rollout_ref.actor.use_kl_loss and config.algorithm.kl_ctrl.kl_coef == 0


def _has_no_kl_loss(config: Config, _: Any) -> bool:
    return not config.actor_rollout_ref.actor.use_kl_loss


def _steers_no_kl(config: Config, _: Any) -> bool:
    control = config.algorithm.kl_ctrl
    return control.type == "fixed" or control.kl_coef == 0 or config.actor_rollout_ref.actor.use_kl_loss


def _has_no_reward_model(config: Config, _: Any) -> bool:
    return not config.reward_model.enable


def _of_estimator(name: str, *, unless: Any) -> Limit:
    """The key `name` of `algorithm`, which some estimators take; those of the user's own are not known."""
    without = [estimator for estimator, taken in ESTIMATOR_TAKES.items() if name not in taken]
    return _moot(
        f"algorithm.{name}",
        when=f"with adv_estimator {', '.join(without)}",
        applies=lambda config, _: config.algorithm.adv_estimator in without,
        reason="algorithm.adv_estimator does not take it",
        unless=unless,
    )


_NO_CRITIC = "algorithm.adv_estimator needs no values"
_NO_REFERENCE = "no KL term is on"
_NO_KL_LOSS = "actor_rollout_ref.actor.use_kl_loss=False"
_NO_REWARD_MODEL = "reward_model.enable=False"

ABSENT_PARTS: tuple[Limit, ...] = (
    _moot(
        *(path for path in leaf_paths() if path.startswith("critic.") and path not in _ALSO_REWARD_MODEL),
        when="without a critic",
        applies=_has_no_critic,
        reason=_NO_CRITIC,
    ),
    _moot(
        *_ALSO_REWARD_MODEL,
        when="without a critic and a reward model",
        applies=lambda config, _: _has_no_critic(config, _) and _has_no_reward_model(config, _),
        reason=_NO_CRITIC,
    ),
    _of_estimator("gamma", unless=1.0),
    _of_estimator("lam", unless=1.0),
    _of_estimator("whiten_advantages", unless=False),
    _of_estimator("norm_adv_by_std_in_grpo", unless=False),
    _moot(
        "actor_rollout_ref.ref.*",
        "algorithm.kl_penalty",
        when="without a reference model",
        applies=_has_no_reference,
        reason=_NO_REFERENCE,
    ),
    _moot(
        "actor_rollout_ref.actor.kl_loss_coef",
        when="without a KL loss",
        applies=_has_no_kl_loss,
        reason=_NO_KL_LOSS,
        unless=0.0,
    ),
    _moot(
        "actor_rollout_ref.actor.kl_loss_type",
        when="without a KL loss",
        applies=_has_no_kl_loss,
        reason=_NO_KL_LOSS,
    ),
    _moot(
        "algorithm.kl_ctrl.kl_coef",
        when="with a KL loss",
        applies=lambda config, _: not _has_no_kl_loss(config, _),
        reason="actor_rollout_ref.actor.use_kl_loss=True: the KL is not in the reward",
        unless=0.0,
    ),
    _moot(
        "algorithm.kl_ctrl.horizon",
        "algorithm.kl_ctrl.target_kl",
        when="without an adaptive KL in the reward",
        applies=_steers_no_kl,
        reason="no adaptive controller steers a KL in the reward",
    ),
    _moot(
        "actor_rollout_ref.actor.rollout_is_threshold",
        when="with rollout_is null",
        applies=lambda config, _: config.actor_rollout_ref.actor.rollout_is is None,
        reason="actor_rollout_ref.actor.rollout_is=null",
    ),
    _moot(
        "reward_model.model.*",
        "reward_model.micro_batch_size",
        "reward_model.micro_batch_size_per_gpu",
        "reward_model.use_dynamic_bsz",
        "reward_model.forward_max_token_len_per_gpu",
        "reward_model.ulysses_sequence_parallel_size",
        "reward_model.max_length",
        when="without a reward model",
        applies=_has_no_reward_model,
        reason=_NO_REWARD_MODEL,
    ),
    _moot(
        "custom_reward_function.name",
        when="with path null",
        applies=lambda config, _: config.custom_reward_function.path is None,
        reason="custom_reward_function.path=null",
    ),
)
