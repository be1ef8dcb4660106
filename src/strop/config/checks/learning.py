"""Rules about what is learnt: groups, KL, sampling, schedules."""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Collection, Iterator

from strop.config.checks.finding import Finding, error, warning
from strop.config.names import (
    ESTIMATOR_NEEDS,
    LOGGER_PACKAGES,
    POLICY_LOSSES,
    REWARD_MANAGERS,
    is_import_path,
    needs_critic,
)
from strop.config.placement import KEEPS_THE_POLICY, extra_sampling
from strop.config.reward_parts import SCORERS, read_parts
from strop.config.schema import Config, RootConfig
from strop.config.schema.base import OptimConfig
from strop.errors import ConfigError

_ROLLOUT = "actor_rollout_ref.rollout"


def groups(config: Config) -> Iterator[Finding]:
    """Estimators that compare the answers to one prompt need more than one answer."""
    name, n = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    if n > 1 or "uid" not in ESTIMATOR_NEEDS.get(name, ()):
        return
    if name == "rloo":
        yield error(
            f"{_ROLLOUT}.n={n} with algorithm.adv_estimator=rloo: the only answer to a prompt has no other "
            f"to be "
            "compared with, so every advantage is 0 (expected n >= 2)"
        )
    else:
        yield warning(
            f"{_ROLLOUT}.n={n} with algorithm.adv_estimator={name}: a group of one has no mean to compare "
            f"with; the "
            "score itself is the advantage (usual: n >= 4)"
        )


def kl(config: Config) -> Iterator[Finding]:
    """The adaptive controller has something to steer."""
    control, use_kl_loss = config.algorithm.kl_ctrl, config.actor_rollout_ref.actor.use_kl_loss
    if control.type == "adaptive" and use_kl_loss:
        yield warning(
            "algorithm.kl_ctrl.type=adaptive has no effect with actor_rollout_ref.actor.use_kl_loss=True: "
            "the KL is in "
            "the loss, with the fixed weight kl_loss_coef"
        )
    elif control.type == "adaptive" and control.kl_coef == 0:
        yield warning(
            "algorithm.kl_ctrl.type=adaptive has no effect with algorithm.kl_ctrl.kl_coef=0: it scales the "
            "weight"
        )


def kl_horizon(config: Config) -> Iterator[Finding]:
    """One iteration must not be able to take the adaptive coefficient to 0."""
    control, samples = (
        config.algorithm.kl_ctrl,
        config.data.train_batch_size * config.actor_rollout_ref.rollout.n,
    )
    steers = control.type == "adaptive" and not config.actor_rollout_ref.actor.use_kl_loss
    if steers and samples >= 5 * control.horizon:
        yield error(
            f"algorithm.kl_ctrl.horizon={control.horizon} is too short for {samples} samples an iteration: "
            f"the coefficient could fall to 0 (expected more than {samples // 5})"
        )


def dual_clip(config: Config) -> Iterator[Finding]:
    """CISPO has no second clip."""
    actor = config.actor_rollout_ref.actor
    if actor.policy_loss == "cispo" and actor.clip_ratio_c is not None:
        yield error(
            f"actor_rollout_ref.actor.clip_ratio_c={actor.clip_ratio_c} with policy_loss=cispo, which has no "
            "dual clip (expected null)"
        )


def sampling(config: Config) -> Iterator[Finding]:
    """The sampler explores, and is the policy that is trained."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.temperature == 0 and not config.trainer.val_only:
        yield error(
            f"{_ROLLOUT}.temperature=0: training needs a temperature above 0, which all log-probs are "
            f"divided by; greedy "
            f"validation is {_ROLLOUT}.val_kwargs.do_sample=False"
        )
    if not rollout.do_sample:
        yield warning(
            f"{_ROLLOUT}.do_sample=False: training takes the likeliest tokens, so the policy explores "
            f"nothing and all "
            f"{_ROLLOUT}.n answers to a prompt are the same"
        )
    narrowed = [
        f"{_ROLLOUT}.{key}" for key, on in (("top_p", rollout.top_p < 1), ("top_k", rollout.top_k > 0)) if on
    ]
    narrowed += [f"{_ROLLOUT}.{key}" for key in extra_sampling(config) if key not in KEEPS_THE_POLICY]
    if narrowed and rollout.do_sample:
        yield warning(
            f"{' and '.join(narrowed)}: the sampler is another distribution than the policy that is "
            f"trained; the "
            "sampler's own log-probs are recorded (training/rollout_probs_diff_mean)"
        )


def validation_sampling(config: Config) -> Iterator[Finding]:
    """Several answers to a validation prompt differ."""
    val = config.actor_rollout_ref.rollout.val_kwargs
    if val.n > 1 and (not val.do_sample or val.temperature == 0):
        yield warning(
            f"{_ROLLOUT}.val_kwargs.n={val.n} greedy answers are all the same; set "
            f"val_kwargs.do_sample=True and "
            "val_kwargs.temperature above 0"
        )
    elif val.do_sample and val.temperature == 0:
        yield warning(f"{_ROLLOUT}.val_kwargs.do_sample=True with temperature=0 is greedy")


def schedules(config: Config) -> Iterator[Finding]:
    """A floor of the learning rate has a decay to end."""
    sections = [("actor_rollout_ref.actor", config.actor_rollout_ref.actor.optim)]
    if needs_critic(config.algorithm.adv_estimator):
        sections.append(("critic", config.critic.optim))
    for section, optim in sections:
        yield from schedule(section, optim)


def schedule(section: str, optim: OptimConfig) -> Iterator[Finding]:
    """The learning rate of the update that `section` names."""
    if optim.min_lr_ratio is not None and optim.warmup_style == "constant":
        yield warning(
            f"{section}.optim.min_lr_ratio={optim.min_lr_ratio} has no effect with warmup_style=constant "
            "(cosine and linear decay to it)"
        )


def critic_warmup(config: Config) -> Iterator[Finding]:
    """The critic's head start needs a critic."""
    steps, name = config.trainer.critic_warmup, config.algorithm.adv_estimator
    if steps and not needs_critic(name):
        yield warning(
            f"trainer.critic_warmup={steps} has no effect: algorithm.adv_estimator={name} has no critic"
        )


# Rules about names: estimators, losses, reward managers and trackers, built in or by import path.

_NOT_IN_A_WANDB_PROJECT = re.compile(r"[/\\#?%:]")


def pluggable_names(config: Config) -> Iterator[Finding]:
    """Estimator, policy loss and reward manager are built in, or importable."""
    yield from _known("algorithm.adv_estimator", config.algorithm.adv_estimator, ESTIMATOR_NEEDS)
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    yield from _known("actor_rollout_ref.actor.policy_loss", policy_loss, POLICY_LOSSES)
    yield from _known("reward_model.reward_manager", config.reward_model.reward_manager, REWARD_MANAGERS)


def trackers(config: RootConfig) -> Iterator[Finding]:
    """Trackers exist, their packages are installed, and the run's names suit them."""
    trainer = config.trainer
    for name in trainer.logger:
        yield from _known("trainer.logger", name, LOGGER_PACKAGES)
        package = LOGGER_PACKAGES.get(name)
        if package and importlib.util.find_spec(package) is None:
            yield error(
                f"trainer.logger={name}: the package {package} is not installed: "
                f"pip install 'strop[{package}]', or leave it out, as in trainer.logger=[console]"
            )
    for key, name in (("project_name", trainer.project_name), ("experiment_name", trainer.experiment_name)):
        if not name.strip():
            yield error(f"trainer.{key}: found an empty name")
    if "wandb" in trainer.logger and _NOT_IN_A_WANDB_PROJECT.search(trainer.project_name):
        yield error(f"trainer.project_name={trainer.project_name}: wandb allows none of / \\ # ? % : in it")


def reward_parts(config: Config) -> Iterator[Finding]:
    """Parts of the score have weights and known scorers; what is set has an effect."""
    rewards = config.reward_model
    try:
        parts = read_parts(rewards.parts)
    except ConfigError as problem:
        for line in problem.problems:
            yield error(line)
        return
    for name, part in parts.items():
        if part.scorer is not None:
            yield from _known(f"reward_model.parts.{name}.scorer", part.scorer, SCORERS)
    if "reward_model" in rewards.parts and not rewards.enable:
        yield warning("reward_model.parts.reward_model has no effect: reward_model.enable=False")
    for key in ("penalty_reward_value", "min_response_length"):
        if f"reward_model.{key}" in (config.written or ()) and not rewards.non_stop_penalty:
            yield warning(f"reward_model.{key} has no effect: reward_model.non_stop_penalty=False")


def _known(key: str, name: str, known: Collection[str]) -> Iterator[Finding]:
    if name in known:
        return
    if not is_import_path(name):
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        own = "your own by its import path, package.module:name"
        yield error(f"{key}={name}: unknown; {hint}(known: {', '.join(known)}; {own})")
        return
    package = re.split("[.:]", name)[0]
    if package != "__main__" and importlib.util.find_spec(package) is None:
        yield error(f"{key}={name}: there is no module {package}; is its folder on PYTHONPATH?")
