"""The protocol of a reward, and an adapter for plain callables. B samples, T padded response tokens."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from strop.errors import ConfigError
from strop.protocol import DataProto
from strop.rewards.reward_output import RewardOutput
from strop.rewards.scorer import Outcome

if TYPE_CHECKING:
    from torch import Tensor


class Tried(NamedTuple):
    """A response to a row, as a model may write it, and its outcome."""

    what: str
    """What the response is, in words."""
    response: str
    outcome: Outcome
    value: float
    """The score in training: that of an error if it failed, 0 if the function does not apply."""

    def in_words(self) -> str:
        """Return the score and its parts, or the last lines of the error."""
        if error := self.outcome.error.strip():
            lines = itertools.takewhile(lambda line: not line.startswith(" "), reversed(error.splitlines()))
            return "; ".join(reversed(list(lines)))
        score = "None: it does not apply" if self.outcome.score is None else f"{self.outcome.score:g}"
        parts = self.outcome.parts.items()
        return score + "".join(
            f", {name} {value:g}" if isinstance(value, float) else f", {name} {value!r:.80}"
            for name, value in parts
        )


@dataclass
class Example:
    """One row, scored as a model may answer."""

    tried: list[Tried]
    """The right answer, as far as it is known, first."""
    function: str
    """What was called, and the values that it takes, in words."""
    prompt: str
    """Its text, or that of its last message."""
    doubt: str = ""
    """A warning about the scores."""
    always_fails: bool = False
    """True if it fails, or is ended, for any text; never for a function of a batch without ``is_check``."""


class PendingReward(Protocol):
    """Rewards of one batch, which may be computed while its samples are generated."""

    takes_samples: bool
    """True if ``add`` is useful; False if the batch is only scored as a whole."""

    def add(self, row: int, token_ids: list[int]) -> None:
        """Score one finished response before the batch is complete. Thread-safe."""
        return

    def complete(self, batch: DataProto) -> None:
        """Set the whole batch, and score the rows that were not added."""

    def cancel(self) -> None:
        """Cancel scoring; the result will not be read."""
        return

    def is_done(self) -> bool:
        """Return True if ``get`` of the complete batch will not wait for scorers."""
        return True

    def get(self, model_scores: Tensor | None = None) -> RewardOutput | Tensor:
        """Wait for the rewards; ``model_scores`` [B] are those of the reward model."""
        ...


@runtime_checkable
class Reward(Protocol):
    """A reward function as the trainer uses it.

    Calling it scores a batch: it returns a ``RewardOutput``, or scores, [B] or token-level [B, T]. Methods
    with a body here are optional for subclasses. The trainer makes an error of each sample whose reward is
    not finite.
    """

    def __call__(self, batch: DataProto) -> RewardOutput | Tensor:
        """Score a finished batch."""
        ...

    def expect(self, prompts: DataProto, *, n: int = 1, with_model: bool = False) -> PendingReward:
        """Start scoring a batch of ``n`` samples for each prompt, which are still to be generated."""
        ...

    def require_scored(self, sources: Iterable[str], *, has_reward_model: bool = False) -> None:
        """Raise an error if a data source cannot be scored."""
        return

    def validate_sources(
        self, sources: Iterable[str], *, has_reward_model: bool = False, elsewhere: Iterable[str] = ()
    ) -> None:
        """Call ``require_scored`` at start-up, and warn about settings that no data source uses."""
        return

    def require_columns(self, columns: Collection[str]) -> None:
        """Raise ``ConfigError`` if a function needs an argument that rows with these columns do not give."""
        return

    def warn_without_ground_truths(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Warn if a function compares with ground truths, and no row has one."""
        return

    def score_example(
        self, prompts: DataProto, *, n: int, has_reward_model: bool, is_check: bool
    ) -> Example | None:
        """Score one row as a model may answer, as a check; None: there is nothing to try.

        ``prompts`` is a batch of one row; a function for a batch gets ``n`` copies of the sample. Without
        ``is_check`` no ``async`` function is called, whose answers may cost, and one for a batch may require
        a size.
        """
        return None

    def is_built_in(self, source: str) -> bool:
        """Return True if a built-in scorer judges this data source."""
        ...

    def start(self) -> None:
        """Start background processes before the first batch needs them."""
        return

    def close(self) -> None:
        """End background processes."""
        return


class BatchReward(Reward):
    """Adapter for a plain callable of the whole batch. It is called in the caller's thread, from ``get``.

    One with a parameter ``return_dict``, as verl's reward managers have, is called with True. It gets a copy
    of the containers, so that columns that it adds stay there.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        try:
            takes_dict = "return_dict" in inspect.signature(function).parameters
        except (TypeError, ValueError):  # written in C, without a signature
            takes_dict = False
        self._options = {"return_dict": True} if takes_dict else {}

    def __call__(self, batch: DataProto, **options: Any) -> Any:
        copy = DataProto(batch.batch, dict(batch.non_tensor_batch), dict(batch.meta_info))
        return self._function(copy, **(self._options | options))

    def expect(self, prompts: DataProto, *, n: int = 1, with_model: bool = False) -> PendingReward:
        return _PendingBatch(self)

    def is_built_in(self, source: str) -> bool:
        return False


class _PendingBatch(PendingReward):
    """The reward of a batch that is scored as a whole."""

    takes_samples = False

    def __init__(self, reward: BatchReward) -> None:
        self._reward, self._batch = reward, DataProto()

    def complete(self, batch: DataProto) -> None:
        self._batch = batch

    def get(self, model_scores: Tensor | None = None) -> Any:
        if model_scores is None:
            return self._reward(self._batch)
        return self._reward(self._batch.union(DataProto({"rm_scores": model_scores})))


def as_reward(function: Reward | Callable[[DataProto], Any]) -> Reward:
    """Return ``function`` itself if it is a ``Reward``, else adapt it."""
    if not isinstance(function, Reward) and hasattr(function, "expect"):
        raise ConfigError(f"{type(function).__name__}.expect: derive the class from rewards.base.Reward")
    return function if isinstance(function, Reward) else BatchReward(function)
