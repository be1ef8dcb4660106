"""Which roles a run has: a model that nothing asks for is not loaded, and gets no processes."""

from __future__ import annotations

from strop.config.names import needs_critic
from strop.config.schema import Config


def uses_reference(config: Config) -> bool:
    """Whether a KL term is on, in the loss or in the reward: only then is the reference model loaded."""
    if config.trainer.val_only:
        return False
    return config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.kl_ctrl.kl_coef > 0


def uses_critic(config: Config) -> bool:
    """Whether there are updates, and the estimator of their advantages needs values."""
    return needs_critic(config.algorithm.adv_estimator) and not config.trainer.val_only


def policy_roles(config: Config) -> list[str]:
    """Actor and rollout in one (the hybrid engine), or apart."""
    return ["ActorRollout"] if config.actor_rollout_ref.hybrid_engine else ["Actor", "Rollout"]


def roles_of(config: Config) -> list[str]:
    """The names of the roles of this run."""
    optional = {
        "RefPolicy": uses_reference(config),
        "Critic": uses_critic(config),
        "RewardModel": config.reward_model.enable,
    }
    return [*policy_roles(config), *(role for role, present in optional.items() if present)]
