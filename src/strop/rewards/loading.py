"""Loading of the reward manager that a configuration names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import OmegaConf

from strop.algorithms.registry import accepted, resolve
from strop.config.load import as_config
from strop.config.names import NO_REWARD
from strop.errors import ConfigError
from strop.rewards.base import BatchReward
from strop.rewards.custom import load_custom_reward
from strop.rewards.manager import RewardManager
from strop.rewards.worker.pool import default_num_workers

if TYPE_CHECKING:
    from strop.config.schema import Config

_KEY = "reward_model.reward_manager"
_SECTION_KEYS = (
    "timeout_s",
    "error_score",
    "max_error_rate",
    "memory_limit_mb",
    "max_concurrency",
    "parts",
    "non_stop_penalty",
    "penalty_reward_value",
    "min_response_length",
)
_OFF_UNLESS_SET = {
    **{
        name: f"reward_model.{name}"
        for name in ("memory_limit_mb", "parts", "non_stop_penalty", "min_response_length")
    },
    "compute_score": "custom_reward_function.path",
    "reward_fn_key": "data.reward_fn_key",
    "by_environment": "environment.path with a class that gives rewards",
}
"""Argument -> key that sets it."""
_OFF = (None, False, 0, {}, "data_source")


def load_reward_manager(
    config: Config | Mapping[str, Any],
    tokenizer: Any,
    num_examine: int = 0,
    by_environment: bool = False,
    /,
    **reward_kwargs: Any,
) -> Any:
    """Make the reward manager that ``reward_model.reward_manager`` names.

    ``naive`` scores in one process, ``prime`` in several, ``none`` not at all; any other name is the import
    path of a class. Its arguments are ``tokenizer``, ``num_examine``, the entries of ``reward_kwargs``
    (mappings as ``DictConfig``), and those of ``compute_score`` (from ``custom_reward_function``, or None),
    ``reward_fn_key`` and ``_SECTION_KEYS`` that it accepts. ``by_environment``: an environment gives rewards.
    ``config`` may be Hydra's, which needs only the keys that differ from the defaults.

    Raises:
        ConfigError: an unknown name, an argument that the class does not take, a key that is on and would be
            ignored, or an unusable custom reward function.
    """
    config = as_config(config)
    section = config.reward_model
    workers = section.num_workers or default_num_workers()
    built_in = {
        "naive": RewardManager,
        "prime": functools.partial(RewardManager, num_workers=workers),
        NO_REWARD: _without_scores,
    }
    build = resolve(section.reward_manager, built_in, _KEY)
    custom = load_custom_reward(config.custom_reward_function.path, config.custom_reward_function.name)
    own = {name: getattr(section, name) for name in _SECTION_KEYS}
    if section.judge.url is not None:
        from strop.rewards.judge import with_judge  # takes the time of an HTTP client's import

        own["parts"] = with_judge(section.parts, section.judge)
    own["compute_score"], own["reward_fn_key"] = custom, config.data.reward_fn_key
    own["prompt_key"], own["by_environment"] = config.data.prompt_key, by_environment
    _require_honoured(build, own, section.reward_manager)
    if section.reward_manager not in built_in:  # verl's managers read attributes: overlong_buffer_cfg.enable
        reward_kwargs = {
            name: OmegaConf.create(value) if type(value) is dict else value
            for name, value in reward_kwargs.items()
        }
    arguments = {
        "tokenizer": tokenizer,
        "num_examine": num_examine,
        **accepted(build, own),
        **reward_kwargs,
    }
    try:
        inspect.signature(build).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"{_KEY}={section.reward_manager!r} with reward_model.reward_kwargs={reward_kwargs}: {error}; "
            f"its parameters are {inspect.signature(build)}"
        ) from None
    return build(**arguments)


def _without_scores(tokenizer: Any, num_examine: int, by_environment: bool = False) -> BatchReward:
    """Return a reward of 0 for all samples."""
    del tokenizer, num_examine, by_environment
    return BatchReward(lambda batch: torch.zeros(len(batch)))


def _require_honoured(build: Callable[..., Any], settings: Mapping[str, Any], name: str) -> None:
    """Raise ``ConfigError`` if a user's manager does not take a key that is on."""
    taken = accepted(build, settings)
    off = {name for name, value in settings.items() if value in _OFF}
    if ignored := [key for name, key in _OFF_UNLESS_SET.items() if name not in off | taken.keys()]:
        keys = ", ".join(ignored)
        raise ConfigError(f"{_KEY}={name!r} does not take {keys}: remove these, or add them as parameters")
