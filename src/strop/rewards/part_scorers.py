"""Scorers by name, and a reward function of several of them. Nothing here is slow to import."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from strop.config.reward_parts import KEY, RULE
from strop.errors import ConfigError, StropError
from strop.rewards.records import ScoreFunction


class BuiltInScorer:
    """A scorer of ``SCORERS`` with its options, called with response and ground truth.

    It is imported when a sample needs it.

    Raises ``ConfigError`` for options that it does not take; ``where`` says where they stand.
    """

    def __init__(self, name: str, options: Mapping[str, Any], *, where: str = "") -> None:
        self._name, self._options, self._where = name, dict(options), where
        if not options:
            return
        try:  # score nothing once, so that wrong options show before the first sample does
            self(solution_str="", ground_truth="0")
        except StropError:
            raise
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{where}: {error}") from error

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In the process that scores: what the options need is loaded before a sample's time begins.

        A scorer that loads for a second, in many processes on few cores, would else be cut off each time.
        """
        vars(self).update(state)
        if self._options:
            self(solution_str="", ground_truth="0")

    def __call__(self, *, solution_str: str, ground_truth: Any, **_others: Any) -> Any:
        return self._module().compute_score(solution_str, ground_truth, **self._options)

    def require_ready(self, deadline_s: float) -> None:
        """At start-up: ``ConfigError`` when it cannot work here, or not before a sample's deadline."""
        if self._name != "code":  # the others need nothing
            return
        try:
            self._module().require_ready(deadline_s=deadline_s, **self._options)
        except ConfigError as error:
            raise ConfigError(f"{self._where}: {error}") from None

    def _module(self) -> ModuleType:
        return importlib.import_module(f"strop.rewards.score.{self._name}")


class OwnScorer:
    """A user's function with its options."""

    def __init__(self, function: ScoreFunction, options: Mapping[str, Any]) -> None:
        self._function, self._options = function, dict(options)

    def __call__(self, **sample: Any) -> Any:
        return self._function(**sample, **self._options)


class PartScorers:
    """A reward function that gives several parts of a score: that of the sample's own source, and others."""

    def __init__(self, own: ScoreFunction, scorers: Mapping[str, ScoreFunction]) -> None:
        self._own, self._scorers = own, dict(scorers)

    def __call__(self, *, parts: Sequence[str], **sample: Any) -> dict[str, Any]:
        """What the source's own function returns (a score of 0 unless it is asked), and those ``parts``."""
        own = self._own(**sample) if RULE in parts else 0.0
        result = dict(own) if isinstance(own, Mapping) else {"score": own}
        for name in parts:
            if name == RULE:
                continue
            if name in result:
                raise ValueError(f"the reward function returns a part {name!r}, and {KEY}.{name} is another")
            value = self._scorers[name](**sample)
            result[name] = value["score"] if isinstance(value, Mapping) else value
        return result
