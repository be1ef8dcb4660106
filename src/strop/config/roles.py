"""The roles of a run; a model that nothing needs is not loaded and gets no processes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple, cast

from strop.config.backends import ROLLOUTS
from strop.config.names import NO_REWARD, needs_critic, sets_noise
from strop.config.schema import Config, RootConfig
from strop.config.schema.policy import adapters_are_switched_off, has_kl_term
from strop.config.schema.supervised import SftConfig, SupervisedConfig
from strop.config.schema.teacher import THE_POLICY, has_teacher, teachers_of
from strop.errors import ConfigError


def uses_reference(config: Config) -> bool:
    """Return True if there are updates with a KL term, in the loss or in the reward."""
    return has_kl_term(config) and not config.trainer.val_only


def reference_is_the_actor(config: Config) -> bool:
    """Return True if the reference is the actor with its LoRA adapters off: no second model is loaded."""
    return uses_reference(config) and adapters_are_switched_off(config)


def uses_teacher(config: Config | SftConfig) -> bool:
    """Return True if there are updates that learn from a teacher."""
    return has_teacher(config) and not config.trainer.val_only


def teacher_is_the_actor(config: Config | SftConfig) -> bool:
    """Return True if the teacher is the actor with its LoRA adapters off."""
    return uses_teacher(config) and config.teacher.model.path == THE_POLICY


def has_teacher_role(config: Config | SftConfig) -> bool:
    """Return True if a worker of its own holds the teacher."""
    return uses_teacher(config) and not teacher_is_the_actor(config)


def teacher_models(config: Config) -> dict[str, Any]:
    """Return the section of each model that teaches beside the policy, by key; none of unusable entries."""
    teachers = []
    if has_teacher_role(config):
        with suppress(ConfigError):  # reported by ``check``
            teachers = teachers_of(config.teacher)
    return {
        "teacher.model" if source is None else f"teacher.by_source.{source}.model": model
        for source, model, _ in teachers
        if model is not None
    }


def teaches_by_advantages(config: Config) -> bool:
    """Return True if the teacher is a part of the advantages, not of the loss."""
    return uses_teacher(config) and config.teacher.kl == "sampled"


def teacher_hidden(config: Config | SftConfig) -> bool:
    """Return True if the teacher's hidden states travel, and its output layer is where the student is."""
    return uses_teacher(config) and config.teacher.kl != "sampled" and config.teacher.top_k is None


def has_reward(config: Config) -> bool:
    """Return True unless a run learns from its teacher alone."""
    return config.reward_model.reward_manager != NO_REWARD


def uses_critic(config: Config) -> bool:
    """Return True if there are updates whose advantage estimator needs values."""
    return needs_critic(config.algorithm.adv_estimator) and not config.trainer.val_only


class Schedule(NamedTuple):
    """Batches that are generated ahead of training (``strop.trainer.pipeline``)."""

    ahead: int
    """Whole batches that are generated before the one that is learned from is done."""
    beside: int
    """Further batches that are begun beside the one being generated."""

    @classmethod
    def of(cls, config: Config) -> Schedule:
        """Return the schedule of ``trainer.async_steps``, the sum of both."""
        steps = config.trainer.async_steps
        return cls(steps - steps // 2, steps // 2)


def loads_policy(config: Config) -> bool:
    """Return True unless the rollout has weights that are not this run's."""
    kind = ROLLOUTS.get(config.actor_rollout_ref.rollout.name)  # None: auto
    return kind is None or not kind.keeps_weights(config)


def policy_roles(config: Config) -> list[str]:
    """Return actor and rollout as one role (the hybrid engine), also with the reference, or as two.

    It is the rollout alone where no policy is loaded.
    """
    if not loads_policy(config):
        return ["Rollout"]
    if not config.actor_rollout_ref.hybrid_engine:
        return ["Actor", "Rollout"]
    return ["ActorRolloutRef" if "ActorRolloutRef" in config.trainer.placement else "ActorRollout"]


def roles_of(config: Config) -> list[str]:
    """Return the names of the roles of this run."""
    policy = policy_roles(config)
    optional = {
        "RefPolicy": uses_reference(config)
        and "ActorRolloutRef" not in policy
        and not reference_is_the_actor(config),
        "Critic": uses_critic(config),
        "RewardModel": config.reward_model.enable,
        "Teacher": has_teacher_role(config),
    }
    return [*policy, *(role for role, present in optional.items() if present)]


def model_paths(config: RootConfig) -> dict[str, str]:
    """Return the path of every model that is loaded, by key; a critic from the policy's path is left out."""
    if not isinstance(config, Config):
        return _supervised_model_paths(cast(SupervisedConfig, config))
    policy = config.actor_rollout_ref.model.path
    paths = {"actor_rollout_ref.model.path": policy} if loads_policy(config) else {}
    if uses_critic(config) and config.critic.model.path != policy:
        paths["critic.model.path"] = config.critic.model.path
    if config.reward_model.enable:
        paths["reward_model.model.path"] = config.reward_model.model.path
    for key, model in teacher_models(config).items():
        paths[f"{key}.path"] = model.path
    return paths


def _supervised_model_paths(config: SupervisedConfig) -> dict[str, str]:
    paths = {"model.path": config.model.path}
    if isinstance(config, SftConfig) and has_teacher_role(config):
        paths["teacher.model.path"] = config.teacher.model.path
    return paths


def critic_tokenizer(config: Config) -> str:
    """Return the path of the critic's tokenizer: its own, or the policy's (``data.tokenizer``)."""
    own = config.critic.model.tokenizer_path
    if own == config.actor_rollout_ref.model.path:
        return config.data.tokenizer or own
    return own or config.critic.model.path


def tokenizer_paths(config: Config) -> dict[str, str]:
    """Return the path of every tokenizer that is loaded and has a separate key, by key."""
    paths = {"data.tokenizer": config.data.tokenizer}
    if uses_critic(config):
        paths["critic.model.tokenizer_path"] = critic_tokenizer(config)
    if config.reward_model.enable:
        paths["reward_model.model.input_tokenizer"] = config.reward_model.model.input_tokenizer
    return {key: path for key, path in paths.items() if path}


def has_kl_in_reward(config: Config) -> bool:
    """Return True if the KL is a penalty in the reward, not a term of the loss."""
    return uses_reference(config) and not config.actor_rollout_ref.actor.use_kl_loss


def uses_full_kl(config: Config) -> bool:
    """Return True if a KL is computed over the whole vocabulary."""
    actor = config.actor_rollout_ref.actor
    full_loss = actor.use_kl_loss and actor.kl_loss_type == "full"
    return uses_reference(config) and (config.algorithm.kl_penalty == "full" or full_loss)


def is_off_policy(config: Config) -> bool:
    """Return True if samples may be of an older policy than the one that learns from them."""
    return config.trainer.async_steps > 0 or config.algorithm.filter_groups.enable


def reason_updates_change_log_probs(config: Config) -> str | None:
    """Return why the update's forward passes are not of the policy before it; None if they are."""
    actor = config.actor_rollout_ref.actor
    if actor.ppo_epochs > 1 or actor.ppo_mini_batch_size < config.data.train_batch_size:
        return "several steps per iteration"
    if sets_noise(config.actor_rollout_ref.model.override_config):
        return "the update runs with dropout"
    return None


def sampler_in_words(config: Config) -> str | None:
    """Return the line of a run that never compares the sampler with the trainer; else None."""
    reason, actor = reason_updates_change_log_probs(config), config.actor_rollout_ref.actor
    if reason is None or not actor.use_rollout_log_probs or config.trainer.val_only:
        return None
    return (
        "training/rollout_* are not logged: with actor.use_rollout_log_probs=True no pass computes the "
        f"trainer's log-probs before the update ({reason}); val/ratio and policy/approxkl_avg compare "
        "sampler and trainer in the update"
    )


def reason_for_old_log_prob_pass(config: Config) -> str | None:
    """Return why old log-probs need a forward pass before the update; None if there is none.

    With ``use_rollout_log_probs`` they are the sampler's. If an iteration is one optimizer step, its own
    forward pass is of the policy before the update: its log-probs are the old ones, every ratio is 1, and the
    gradient equals that of log-probs computed before, also where ``rollout_is`` weighs the loss by them. They
    are then known only after the step, so nothing before it may need them.
    """
    actor = config.actor_rollout_ref.actor
    if actor.use_rollout_log_probs:
        return None
    if not actor.old_log_prob_from_update:
        return "old_log_prob_from_update=False"
    if reason := reason_updates_change_log_probs(config):
        return reason
    if uses_full_kl(config):
        return "the full KL is computed with them"
    if has_kl_in_reward(config):
        return "the KL in the reward needs them"
    if teaches_by_advantages(config):
        return "the teacher's advantages need them"
    return None
