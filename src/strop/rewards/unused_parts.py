"""Weights of ``reward_model.parts`` that never count, most often because a name is misspelt."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from strop.config.reward_parts import KEY, OTHER_SOURCES, REWARD_MODEL, RULE, RewardPart
from strop.errors import RewardError

logger = logging.getLogger(__name__)


class UnusedParts:
    """Looks for them, at start-up and in the first scores; says each thing once."""

    def __init__(self, parts: Mapping[str, RewardPart]) -> None:
        self._parts = parts
        # Only the reward function itself can give these, beside its score.
        self._awaited = {
            name for name, part in parts.items() if part.scorer is None and name not in (RULE, REWARD_MODEL)
        }
        self._told: set[tuple[str, str]] = set()

    def warn_of_sources(self, sources: Collection[str], *, known: Collection[str]) -> None:
        """Warn of weights for a data source that is not among ``sources``, those of the prompts.

        Not for ``known`` ones: training and validation may have prompts of different sources.
        """
        for name, part in self._parts.items():
            for source in part.weights.keys() - {OTHER_SOURCES, *sources, *known}:
                if (name, source) not in self._told:
                    self._told.add((name, source))
                    logger.warning(
                        "%s.%s.weight: none of the prompts has data_source %r (there are: %s); "
                        "is it misspelt?",
                        KEY, name, source, ", ".join(sorted(sources)),
                    )  # fmt: skip

    def require_returned(self, found: Collection[str], sources: Collection[str]) -> None:
        """``RewardError`` when a part with a weight was never ``found`` in the scores of ``sources``.

        These are the data sources of the samples that the reward function scored. Asked until a sample has
        the part: a function may leave it out later on.
        """
        self._awaited -= set(found)
        for name in sorted(self._awaited):
            if any(self._parts[name].weight(source) != 0 for source in sources):
                returned = ", ".join(sorted(set(found) - {RULE, REWARD_MODEL})) or "a score alone"
                raise RewardError(
                    f"{KEY}.{name} has a weight and no scorer, so the reward function has to return it, for "
                    f"{len(sources)} samples it returned {returned}; correct the name, return it (0 where "
                    "it does not apply), give the part a scorer, or leave it out"
                )
