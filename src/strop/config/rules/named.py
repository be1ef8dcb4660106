"""Rules about names: estimators, losses, reward managers and trackers, built in or by import path."""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Collection, Iterator

from strop.config.names import (
    ESTIMATOR_NEEDS,
    LOGGER_PACKAGES,
    POLICY_LOSSES,
    REWARD_MANAGERS,
    is_import_path,
)
from strop.config.reward_parts import SCORERS, read_parts
from strop.config.rules.finding import Finding, error, warning
from strop.config.schema import Config, RootConfig
from strop.errors import ConfigError

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
