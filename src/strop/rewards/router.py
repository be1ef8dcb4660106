"""The built-in scorer of each data source, which is imported when a sample needs it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from strop.config.backends import load_backend
from strop.config.reward_parts import SCORERS
from strop.errors import ConfigError, RewardError, StropError
from strop.rewards.arguments import KEYWORDS


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
        of_prompt = {"response_prefix": response_prefix}
        further = {"length": {"n_tokens": n_response_tokens}, "format": of_prompt, "code": of_prompt}
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


BUILT_IN = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "Rowan/hellaswag": "choice",
    "openai/openai_humaneval": "code",
    "google-research-datasets/mbpp": "code",
    "strop/arithmetic": "exact",
}
"""Data source -> name of its scorer."""


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> Any:
    """Score one response by the scorer of its data source, as reward managers of verl call it.

    They take numbers: one that cannot be judged scores 0. Raises ``RewardError`` if there is no scorer.
    """
    found = Router()(
        data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info
    )
    return 0.0 if found == {"score": None} else found


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
    """A reward function that picks the scorer by data source.

    ``options`` holds keyword arguments for scorers by data source, for example
    ``{"openai/gsm8k": {"method": "flexible"}}`` or ``{"lighteval/MATH": {"method": "math-verify"}}``.

    Raises:
        ConfigError: options for a source without a built-in scorer, or options that it does not take.
        MissingExtraError: an option needs a package that is not installed.
    """

    argument_names = frozenset({*KEYWORDS, "response_prefix"})
    """See ``strop.rewards.arguments.Function``."""
    sources = sorted(BUILT_IN)
    """The data sources that have a scorer."""

    def __init__(self, options: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        options = options or {}
        for source in options:
            if not self.is_built_in(source):
                raise ConfigError(
                    f"scorer_kwargs: the data source {source!r} has no built-in scorer "
                    f"(known: {', '.join(self.sources)})"
                )
        self._built_in = {
            source: BuiltInScorer(name, options.get(source, {}), where=f"scorer_kwargs for {source!r}")
            for source, name in BUILT_IN.items()
        }

    def __call__(self, *, data_source: str, **values: Any) -> Any:
        if not self.is_built_in(data_source):
            raise UnknownSourceError.of(data_source, self.sources)
        return self._built_in[data_source](**values)

    def require_ready(self, data_source: str, deadline_s: float) -> None:
        """Raise ``ConfigError`` if the source's scorer cannot work here, or not within the deadline."""
        if self.is_built_in(data_source):
            self._built_in[data_source].require_ready(deadline_s)

    @staticmethod
    def is_built_in(data_source: str) -> bool:
        """Return True if there is a scorer for the source."""
        return data_source in BUILT_IN
