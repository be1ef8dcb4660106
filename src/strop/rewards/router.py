"""The scorer of each data source.

Built-in scorers are imported when a sample needs them. ``register_scorer`` adds one for a further data
source; it takes the names of :mod:`strop.rewards.arguments`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from strop.config.backends import load_backend
from strop.config.reward_parts import SCORERS
from strop.errors import ConfigError, RewardError, StropError
from strop.rewards.arguments import KEYWORDS, Function, ScoreFunction


class BuiltInScorer:
    """A scorer of ``SCORERS`` with its options, called with response and ground truth.

    Raises ``ConfigError`` for options that it does not take; ``where`` is their configuration key.
    """

    argument_names = frozenset({"solution_str", "ground_truth", "n_response_tokens", "response_prefix"})
    """See ``strop.rewards.arguments.Function``."""

    def __init__(self, name: str, options: Mapping[str, Any], *, where: str = "") -> None:
        self._name, self._options, self._where = name, dict(options), where
        if not options:
            return
        try:  # score an empty response, so that wrong options fail now
            self(solution_str="", ground_truth="0", n_response_tokens=0)
        except StropError:
            raise
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{where}: {error}") from error

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load in the scoring process what the options need, before a sample's deadline starts.

        A scorer that loads for a second, in many processes on few cores, would otherwise time out each time.
        """
        vars(self).update(state)
        if self._options:
            self(solution_str="", ground_truth="0", n_response_tokens=0)

    def __call__(
        self,
        *,
        solution_str: str,
        ground_truth: Any,
        n_response_tokens: int | None = None,
        response_prefix: str = "",
        **_others: Any,
    ) -> Any:
        # No other scorer counts tokens, or reads what the prompt wrote.
        further = {"length": {"n_tokens": n_response_tokens}, "format": {"response_prefix": response_prefix}}
        known = further.get(self._name, {})
        score = load_backend(SCORERS[self._name])(solution_str, ground_truth, **known, **self._options)
        return {"score": None} if score is None else score

    def require_ready(self, deadline_s: float) -> None:
        """Raise ``ConfigError`` if it cannot work here, or not within a sample's deadline."""
        if self._name != "code":  # only code has requirements
            return
        from strop.rewards.score import code

        try:
            code.require_ready(deadline_s=deadline_s, **self._options)
        except ConfigError as error:
            raise ConfigError(f"{self._where}: {error}") from None


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

    It replaces a built-in scorer of the same source. Reward managers made before this call do not see it.
    """
    if not isinstance(scorer, str):
        _for_one_sample(scorer, data_source)
    _registered[data_source] = scorer


def _for_one_sample(scorer: ScoreFunction, data_source: str) -> Function:
    function = Function(scorer, f"register_scorer({data_source!r}): the scorer")
    if function.is_batch:
        raise ConfigError(
            f"{function.where} takes a whole batch, which may have other data sources: expected a function "
            "for one sample (or make it a part: reward_model.parts)"
        )
    return function


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> Any:
    """Score one response by the scorer of its data source. Raises ``RewardError`` if there is none."""
    return Router()(
        data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info
    )


class UnknownSourceError(RewardError, NotImplementedError):
    """A data source without a scorer."""

    @classmethod
    def of(cls, data_source: str, known: Iterable[str]) -> UnknownSourceError:
        """Return the error; ``known`` are the sources with a scorer."""
        return cls(
            f"no reward for data_source {data_source!r}: name your function with "
            "custom_reward_function.path=FILE.py (others: strop docs rewards); built-in scorers are those of "
            f"{', '.join(sorted(known))}"
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
        self._functions = {
            source: _for_one_sample(scorer, source)
            for source, scorer in self._registered.items()
            if not isinstance(scorer, str)
        }
        self.is_async = any(function.is_async for function in self._functions.values())
        known = self._functions.values()
        self.takes_all = len(known) < len(self._registered) or any(one.takes_all for one in known)
        """True if a registered scorer may take any value (import paths are not imported here)."""
        self.argument_names = frozenset(KEYWORDS).union(*(one.wanted() for one in known))
        """See ``strop.rewards.arguments.Function``."""
        options = options or {}
        for source in options:
            if source in self._registered or source not in _BUILT_IN:
                raise ConfigError(
                    f"scorer_kwargs: the data source {source!r} has no built-in scorer "
                    f"(known: {', '.join(sorted(_BUILT_IN))})"
                )
        self._built_in = {
            source: BuiltInScorer(name, options.get(source, {}), where=f"scorer_kwargs for {source!r}")
            for source, name in _BUILT_IN.items()
        }

    def __call__(self, *, data_source: str, **values: Any) -> Any:
        scorer = self._registered.get(data_source)
        if scorer is None:
            if data_source not in self._built_in:
                raise UnknownSourceError.of(data_source, self.sources)
            return self._built_in[data_source](**values)
        if isinstance(scorer, str):
            scorer = load_backend(scorer)
        function = self._functions.get(data_source) or _for_one_sample(scorer, data_source)
        return function.function(**function.arguments({"data_source": data_source, **values}))

    def require_columns(self, columns: Collection[str]) -> None:
        """Raise ``ConfigError`` if a registered scorer needs an argument that is not there."""
        for function in self._functions.values():
            function.require(columns)

    def require_ready(self, data_source: str, deadline_s: float) -> None:
        """Raise ``ConfigError`` if the source's scorer cannot work here, or not within the deadline."""
        if self.is_built_in(data_source):
            self._built_in[data_source].require_ready(deadline_s)

    def is_built_in(self, data_source: str) -> bool:
        """Return True if a built-in scorer, not a registered one, scores the source."""
        return data_source in self._built_in and data_source not in self._registered

    @property
    def sources(self) -> list[str]:
        """The data sources that have a scorer."""
        return sorted({*_BUILT_IN, *self._registered})
