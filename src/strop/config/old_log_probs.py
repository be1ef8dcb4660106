"""Where old log-probs come from: a forward pass of their own, or the update's own first one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strop.config.roles import uses_reference
from strop.config.schema import Config


def why_old_log_probs_are_computed_apart(config: Config) -> str | None:
    """What keeps the update's own forward pass from giving the old log-probs, in words; None for nothing.

    When an iteration is one optimizer step, the policy of that step's forward pass is the one that sampled:
    its log-probs are the old ones, every ratio is 1 and the gradient is that of old log-probs computed
    before. They are then known only after the step, so nothing before it may need them.
    """
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    if not actor.old_log_prob_from_update:
        return "old_log_prob_from_update=False"
    if actor.ppo_epochs > 1 or actor.ppo_mini_batch_size < config.data.train_batch_size:
        return "several steps an iteration"
    if actor.rollout_is is not None:
        return "rollout_is weighs the loss by them"
    if uses_reference(config):
        if algorithm.kl_penalty == "full" or (actor.use_kl_loss and actor.kl_loss_type == "full"):
            return "the full KL is computed with them"
        if not actor.use_kl_loss:
            return "the KL in the reward needs them"
    if _sets_dropout(config.actor_rollout_ref.model.override_config):
        return "the update runs with dropout"
    return None


def _sets_dropout(override: Mapping[str, Any]) -> bool:
    """Whether a model's configuration is overlaid with noise that only training passes have."""
    for key, value in override.items():
        if isinstance(value, Mapping):
            if _sets_dropout(value):
                return True
        elif ("drop" in key or "jitter" in key) and isinstance(value, int | float) and value > 0:
            return True
    return False
