"""``reward_model.parts``: what a sample's score is the weighted sum of.

At the bottom of the layers, on nothing but the standard library: the configuration reads it, and so does the
process that scores, which has to start at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from strop.errors import ConfigError

KEY = "reward_model.parts"
RULE = "rule"
"""Part of the data source's own scorer, or of the custom reward function."""
REWARD_MODEL = "reward_model"
NON_STOP_PENALTY = "non_stop_penalty"
"""What the penalty makes of the others' sum; it has no weight."""
RESERVED = (RULE, REWARD_MODEL, NON_STOP_PENALTY)
OTHER_SOURCES = "*"
SCORERS: dict[str, str] = {
    "choice": "strop.rewards.score.choice:compute_score",
    "code": "strop.rewards.score.code:compute_score",
    "exact": "strop.rewards.score.exact:compute_score",
    "format": "strop.rewards.score.exact:compute_format_score",
    "gsm8k": "strop.rewards.score.gsm8k:compute_score",
    "length": "strop.rewards.score.exact:compute_length_score",
    "math": "strop.rewards.score.math:compute_score",
}
"""Built-in scorers: name -> "module:function"."""

_FIELDS = ("weight", "scorer", "kwargs")


@dataclass(frozen=True)
class RewardPart:
    """A named number of a sample, and what it counts in the sample's score."""

    weights: Mapping[str, float]
    """By data source; ``*`` for those that are not named."""
    scorer: str | None = None
    """Name or import path of the function that gives the number; None: it comes from elsewhere."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def weight(self, data_source: str) -> float:
        """0 for a data source that has no such part."""
        return self.weights.get(data_source, self.weights.get(OTHER_SOURCES, 0.0))


def read_parts(parts: Mapping[str, Any] | None) -> dict[str, RewardPart]:
    """The parts by name, ``rule`` and ``reward_model`` (of weight 1 where nothing is said) among them.

    Each is a number (its weight) or a mapping ``{weight, scorer, kwargs}``, where ``weight`` (1) is a number
    or a mapping from data source to number.

    Raises:
        ConfigError: a line for everything that is wrong.
    """
    problems: list[str] = []
    found = {name: RewardPart({OTHER_SOURCES: 1.0}) for name in (RULE, REWARD_MODEL)}
    for name, given in (parts or {}).items():
        entry = given if isinstance(given, Mapping) else {"weight": given}
        own = list(_problems(str(name), entry))
        problems += own
        if not own:
            weight = entry.get("weight", 1.0)
            weights = weight if isinstance(weight, Mapping) else {OTHER_SOURCES: weight}
            found[str(name)] = RewardPart(
                {str(source): float(value) for source, value in weights.items()},
                entry.get("scorer"),
                dict(entry.get("kwargs") or {}),
            )
    if problems:
        raise ConfigError(*problems)
    return found


def _problems(name: str, entry: Mapping[str, Any]) -> Iterator[str]:
    where = f"{KEY}.{name}"
    for word in entry:
        if word not in _FIELDS:
            yield f"{where}.{word}: unknown key; the keys of a part are {', '.join(_FIELDS)}"
    weight = entry.get("weight", 1.0)
    for source, value in (weight if isinstance(weight, Mapping) else {OTHER_SOURCES: weight}).items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            yield (
                f"{where}.weight: found {value!r} for data source {source!r}, expected a number, or a "
                f"mapping from data source (or {OTHER_SOURCES!r}) to number"
            )
    scorer, kwargs = entry.get("scorer"), entry.get("kwargs") or {}
    if not isinstance(kwargs, Mapping):
        yield f"{where}.kwargs: found {kwargs!r}, expected a mapping"
    if scorer is not None and not isinstance(scorer, str):
        yield f"{where}.scorer: found {scorer!r}, expected a scorer's name or import path"
    if name == NON_STOP_PENALTY:
        yield f"{where}: the name is taken; reward_model.non_stop_penalty turns the penalty on"
    if name in (RULE, REWARD_MODEL) and (scorer or kwargs):
        yield f"{where}: it has a weight only; a scorer of your own is a part of another name"
    if kwargs and scorer is None:
        yield f"{where}.kwargs: they are the scorer's, and there is none"
