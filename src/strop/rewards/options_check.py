"""The options of scorers in a configuration, tried before a run; without torch, for ``strop check``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from strop.config.reward_parts import KEY, SCORERS, read_parts
from strop.config.schema import Config
from strop.errors import ConfigError, MissingExtraError
from strop.rewards.router import BuiltInScorer, Router

_SCORER_KWARGS = "reward_model.reward_kwargs.scorer_kwargs"
MANAGER_OPTIONS = (
    "tokenizer",
    "num_examine",
    "compute_score",
    "reward_fn_key",
    "timeout_s",
    "error_score",
    "max_error_rate",
    "num_workers",
    "scorer_kwargs",
    "parts",
    "non_stop_penalty",
    "penalty_reward_value",
    "min_response_length",
    "printer",
)
"""What ``strop.rewards.manager.RewardManager``, which needs torch, takes."""


def option_problems(config: Config) -> list[str]:
    """What is wrong with ``reward_model.reward_kwargs`` and the options of built-in scorers.

    A reward manager of the user's own is not looked at: its arguments are known when it is made.
    """
    rewards, problems = config.reward_model, []
    if rewards.reward_manager in ("naive", "prime"):
        unknown = [name for name in rewards.reward_kwargs if name not in MANAGER_OPTIONS]
        problems += [
            f"reward_model.reward_kwargs.{name}: unknown; reward_model.reward_manager="
            f"{rewards.reward_manager} takes {', '.join(MANAGER_OPTIONS)}"
            for name in unknown
        ]
        if options := rewards.reward_kwargs.get("scorer_kwargs"):
            problems += _scorer_kwargs_problems(options, config.custom_reward_function.path)
    try:
        parts = read_parts(rewards.parts)
    except ConfigError:  # the configuration's own rules tell
        return problems
    for name, part in parts.items():
        if part.scorer in SCORERS:
            problems += _problems_of(BuiltInScorer, part.scorer, part.kwargs, where=f"{KEY}.{name}.kwargs")
    return problems


def _scorer_kwargs_problems(options: Any, custom_path: str | None) -> list[str]:
    if custom_path is not None:
        return [f"{_SCORER_KWARGS} is for the built-in scorers: custom_reward_function.path is set"]
    if not isinstance(options, Mapping) or not all(isinstance(own, Mapping) for own in options.values()):
        return [f"{_SCORER_KWARGS}: found {options!r}, expected data source -> option -> value"]
    return _problems_of(Router, options)


def _problems_of(make: Callable[..., Any], *arguments: Any, **options: Any) -> list[str]:
    try:
        make(*arguments, **options)
    except ConfigError as error:
        return list(error.problems)
    except MissingExtraError as error:
        return [str(error)]
    return []
