"""Which scorer belongs to which data source.

Built-in scorers are named by import path and loaded when a sample needs them. ``register_scorer`` adds one
for a further data source; it has the signature of a custom reward function (:mod:`strop.rewards.custom`).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from strop.config.reward_parts import KEY, RULE, SCORERS
from strop.errors import ConfigError, RewardError, StropError
from strop.rewards.custom import require_score_signature
from strop.rewards.worker.records import ScoreFunction

# Scorers by name, and a reward function of several of them. Nothing here is slow to import.


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
        return _load(SCORERS[self._name])(solution_str, ground_truth, **self._options)

    def require_ready(self, deadline_s: float) -> None:
        """At start-up: ``ConfigError`` when it cannot work here, or not before a sample's deadline."""
        if self._name != "code":  # the others need nothing
            return
        from strop.rewards.score import code

        try:
            code.require_ready(deadline_s=deadline_s, **self._options)
        except ConfigError as error:
            raise ConfigError(f"{self._where}: {error}") from None


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


_BUILT_IN = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "Rowan/hellaswag": "choice",
    "openai/openai_humaneval": "code",
    "google-research-datasets/mbpp": "code",
    "strop/arithmetic": "exact",
}

_registered: dict[str, ScoreFunction | str] = {}


def register_scorer(data_source: str, scorer: ScoreFunction | str) -> None:
    """Score the rows of ``data_source`` with ``scorer``: a function, or the import path ``module:function``.

    It goes before a built-in scorer of the same source. Reward managers made before this call do not see it.
    """
    if not isinstance(scorer, str):
        require_score_signature(scorer, f"register_scorer({data_source!r}): the scorer")
    _registered[data_source] = scorer


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> Any:
    """The score of one response by the scorer of its data source; ``RewardError`` when there is none."""
    return Router()(
        data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info
    )


class UnknownSourceError(RewardError):
    """A data source without a scorer; ``known`` are those with one."""

    def __init__(self, data_source: str, known: Sequence[str]) -> None:
        super().__init__(data_source, known)
        self.data_source = data_source
        self.what = f"data_source {data_source!r} has no scorer (known: {', '.join(known)})"

    def __str__(self) -> str:
        return (
            f"{self.what}. To add one, set custom_reward_function.path to a Python file with "
            "compute_score(data_source, solution_str, ground_truth, extra_info=None), "
            "or call strop.rewards.router.register_scorer(data_source, function)"
        )


class Router:
    """A reward function that picks the scorer by data source, with the scorers known when it was made.

    ``options`` holds keyword arguments for built-in scorers by data source, for example
    ``{"openai/gsm8k": {"method": "flexible"}}`` or ``{"lighteval/MATH": {"method": "math-verify"}}``.

    Raises:
        ConfigError: options for a source without a built-in scorer, or options that it does not take.
        MissingExtraError: an option needs a package that is not installed.
    """

    def __init__(self, options: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self._registered = dict(_registered)
        options = options or {}
        for source in options:
            if source in self._registered or source not in _BUILT_IN:
                raise ConfigError(
                    f"scorer_kwargs: {source!r} is no data source with a built-in scorer "
                    f"(known: {', '.join(sorted(_BUILT_IN))})"
                )
        self._built_in = {
            source: BuiltInScorer(name, options.get(source, {}), where=f"scorer_kwargs for {source!r}")
            for source, name in _BUILT_IN.items()
        }

    def __call__(self, *, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> Any:
        scorer: ScoreFunction
        if data_source in self._registered:
            scorer = _load(self._registered[data_source])
        elif data_source in self._built_in:
            scorer = self._built_in[data_source]
        else:
            raise unknown_source(data_source, self.sources)
        return scorer(
            data_source=data_source,
            solution_str=solution_str,
            ground_truth=ground_truth,
            extra_info=extra_info,
        )

    def require_ready(self, data_source: str, deadline_s: float) -> None:
        """At start-up: ``ConfigError`` when the scorer of a source cannot work here, or not in that time."""
        if self.is_built_in(data_source):
            self._built_in[data_source].require_ready(deadline_s)

    def is_built_in(self, data_source: str) -> bool:
        """Whether a built-in scorer scores the source, not a registered one."""
        return data_source in self._built_in and data_source not in self._registered

    @property
    def sources(self) -> list[str]:
        """The data sources that have a scorer."""
        return sorted({*_BUILT_IN, *self._registered})


def unknown_source(data_source: str, known: Iterable[str]) -> UnknownSourceError:
    """The error for a data source without a scorer."""
    return UnknownSourceError(data_source, sorted(known))


def _load(scorer: ScoreFunction | str) -> ScoreFunction:
    if not isinstance(scorer, str):
        return scorer
    module, _, attribute = scorer.partition(":")
    return getattr(importlib.import_module(module), attribute)
