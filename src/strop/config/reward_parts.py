"""``reward_model.parts``: the terms of a sample's score.

Only the standard library is imported here: besides the configuration, the scoring process reads this module,
and it has to start at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from strop.errors import ConfigError

KEY = "reward_model.parts"
RULE = "rule"
"""The part that the data source's scorer, or the custom reward function, gives."""
REWARD_MODEL = "reward_model"
ENVIRONMENT = "environment"
"""The part that an environment gives (``reward`` of its class)."""
JUDGE = "judge"
"""The part that ``reward_model.judge`` gives."""
NON_STOP_PENALTY = "non_stop_penalty"
"""The change that the penalty makes to the sum of the others; it has no weight."""
BUILT_IN = (RULE, REWARD_MODEL, ENVIRONMENT)
"""Parts that weigh 1 by default, and have no scorer of their own."""
RESERVED = (*BUILT_IN, NON_STOP_PENALTY)
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
    """A named number of a sample, and its weights in the sample's score."""

    weights: Mapping[str, float]
    """Weight by data source; ``*`` for all others."""
    scorer: Any = None
    """The function that gives the number, its name or import path; None: another source gives it."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def weight(self, data_source: str) -> float:
        """Return the weight for a data source; 0 if it has no such part."""
        return self.weights.get(data_source, self.weights.get(OTHER_SOURCES, 0.0))


def read_parts(parts: Mapping[str, Any] | None) -> dict[str, RewardPart]:
    """Return the parts by name, with those of ``BUILT_IN``.

    Each is a number (its weight) or a mapping ``{weight, scorer, kwargs}``, where ``weight`` (1) is a number
    or a mapping from data source to number.

    Raises:
        ConfigError: a line for each mistake.
    """
    problems: list[str] = []
    found = {name: RewardPart({OTHER_SOURCES: 1.0}) for name in BUILT_IN}
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
    if scorer is not None and not isinstance(scorer, str) and not callable(scorer):
        yield f"{where}.scorer: found {scorer!r}, expected a scorer's name or import path"
    if name == NON_STOP_PENALTY:
        yield f"{where}: the name is taken; reward_model.non_stop_penalty turns the penalty on"
    if name in BUILT_IN and (scorer or kwargs):
        yield f"{where}: it has a weight only; give your own scorer a part with another name"
    if kwargs and scorer is None:
        yield f"{where}.kwargs: they are arguments of the scorer, and there is none"
