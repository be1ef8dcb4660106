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


def model_paths(config: Config) -> dict[str, str]:
    """Key -> path of every model that is loaded; a critic that starts from the policy is not named again."""
    policy = config.actor_rollout_ref.model.path
    paths = {"actor_rollout_ref.model.path": policy}
    if uses_critic(config) and config.critic.model.path != policy:
        paths["critic.model.path"] = config.critic.model.path
    if config.reward_model.enable:
        paths["reward_model.model.path"] = config.reward_model.model.path
    return paths


def critic_tokenizer(config: Config) -> str:
    """The path of the critic's: its own, or the policy's, also where that is apart from its model."""
    own = config.critic.model.tokenizer_path
    if own == config.actor_rollout_ref.model.path:
        return config.data.tokenizer or own
    return own or config.critic.model.path


def tokenizer_paths(config: Config) -> dict[str, str]:
    """Key -> path of every tokenizer that is loaded and has a key of its own."""
    paths = {"data.tokenizer": config.data.tokenizer}
    if uses_critic(config):
        paths["critic.model.tokenizer_path"] = critic_tokenizer(config)
    if config.reward_model.enable:
        paths["reward_model.model.input_tokenizer"] = config.reward_model.model.input_tokenizer
    return {key: path for key, path in paths.items() if path}
