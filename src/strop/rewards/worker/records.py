"""What crosses between a run and the process that scores for it: samples there, outcomes back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from strop.config.reward_parts import RESERVED

Status = Literal["scored", "raised", "timeout", "crashed"]

ScoreFunction = Callable[..., Any]
"""Called with ``KEYWORDS``; returns a number, or a dict with one under "score"."""

KEYWORDS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Of a reward function."""


class Setup(NamedTuple):
    """The first message to a scoring process."""

    module_path: list[str]
    """``sys.path`` of the sender: what it can import, the process can."""
    function: bytes
    """The scorer, pickled; unpickled only after ``sys.path`` is set."""


class Sample(NamedTuple):
    """What a scorer is told of one response."""

    data_source: str
    solution_str: str
    """The response alone, decoded, without special tokens."""
    ground_truth: Any = None
    extra_info: Any = None
    parts: tuple[str, ...] | None = None
    """Which parts of its score are asked for, of a function that gives several."""

    def keywords(self) -> dict[str, Any]:
        """What the function is called with."""
        fields = self._asdict()
        if self.parts is None:
            del fields["parts"]
        return fields


@dataclass(frozen=True)
class Outcome:
    """What became of one sample: a score, or the reason why there is none."""

    status: Status
    score: float = 0.0
    """Only with ``scored``; it may be NaN or infinite: the reader decides what that means."""
    parts: dict[str, float] = field(default_factory=dict)
    """Further named numbers that the scorer returned; ``score`` is not their sum."""
    error: str = ""
    """The traceback, or what happened to the process."""

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.score) and all(map(math.isfinite, self.parts.values()))


def call_scorer(function: ScoreFunction, sample: Sample) -> Outcome:
    """The outcome of one call that returns; what the function raises goes through.

    Raises ``TypeError`` or ``ValueError`` when what it returned is not a score.
    """
    return outcome_of(function(**sample.keywords()))


def outcome_of(result: Any) -> Outcome:
    """A returned number, or a mapping with a number under "score" and further named numbers."""
    if not isinstance(result, Mapping):
        return Outcome("scored", _number(result, "the score"))
    if "score" not in result:
        raise ValueError(f"the returned dict has no key 'score'; it has {sorted(map(str, result))}")
    parts = {str(name): _number(value, f"part {name!r}") for name, value in result.items() if name != "score"}
    if taken := [name for name in RESERVED if name in parts]:
        raise ValueError(f"the returned dict names a part {taken[0]!r}, which is taken; choose another name")
    return Outcome("scored", _number(result["score"], "the score"), parts)


def _number(value: Any, name: str) -> float:
    # A string would pass float(), and so hide a function that returns its answer instead of a score.
    if isinstance(value, str | bytes):
        raise TypeError(f"{name} is {value!r:.80}: expected a number, found text (leave such parts out)")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} is {value!r:.80}: expected a number, found {type(value).__name__}"
        ) from error
