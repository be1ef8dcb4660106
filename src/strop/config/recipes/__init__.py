"""Recipes: YAML files that lie over the shipped defaults, and below the user's file and keys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from strop.config.names import inputs_of
from strop.config.overrides import compose_file
from strop.config.paths import expand, similar_path
from strop.errors import ConfigError, did_you_mean

RECIPES = {file.stem: file for file in sorted(Path(__file__).parent.glob("*.yaml"))}
"""Name -> the shipped file."""


_ESTIMATORS = {"ppo": "gae", "reinforce++": "reinforce_plus_plus"}


def by_algorithm(name: str | None) -> tuple[str, str | None]:
    """Return the recipe of an algorithm, ``grpo`` if none has its name, and its estimator, if it is named."""
    return name if name in RECIPES else "grpo", _ESTIMATORS.get(name or "", name)


def read_recipe(recipe: str | Path, default_name: str) -> DictConfig:
    """Return the keys of a shipped recipe, or of the user's YAML file, with interpolations as they stand.

    ``default_name``: name of the shipped defaults, see ``compose_file``. Raises ``ConfigError`` if there is
    no such recipe, or if it does not compose.
    """
    file = RECIPES.get(str(recipe)) or Path(expand(recipe)).resolve()
    if not file.is_file():
        near = did_you_mean(str(recipe), RECIPES) or similar_path(recipe)
        raise ConfigError(f"recipe {recipe}: expected {', '.join(RECIPES)}, or the path of a YAML file{near}")
    if file in RECIPES.values() and "defaults" not in (keys := cast(DictConfig, OmegaConf.load(file))):
        return keys  # Hydra would return the same, in a tenth of a second
    return compose_file(file, (), default_name)


def _by_estimator(choices: Mapping[str, Any], *, _root_: DictConfig) -> Any:
    """Return the first value whose key is the run's estimator, or an input of it, or ``else``."""
    name = _root_.algorithm.adv_estimator
    fitting = {name, "else", *inputs_of(name)}
    return next(value for key, value in choices.items() if key in fitting)


def _by_reward(choices: Mapping[str, Any], *, _root_: DictConfig) -> Any:
    """Return the value for a run with a reward of the user's, ``given``, or ``else``."""
    rewards = _root_.reward_model
    is_given = _root_.custom_reward_function.path or rewards.parts or rewards.enable or rewards.judge.url
    return choices["given" if is_given else "else"]


OmegaConf.register_new_resolver("by_estimator", _by_estimator, replace=True)
OmegaConf.register_new_resolver("by_reward", _by_reward, replace=True)
