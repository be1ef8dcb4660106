"""Whether something scores the rows of a data source; without torch, for ``strop check``."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from strop.config.reward_parts import KEY, REWARD_MODEL, RULE, RewardPart
from strop.errors import RewardError
from strop.rewards.router import unknown_source


def asked_parts(parts: Mapping[str, RewardPart], source: str, *, has_rule: bool) -> tuple[str, ...]:
    """The parts of a sample of ``source`` that functions give."""
    rule = (RULE,) if has_rule and parts[RULE].weight(source) != 0 else ()
    others = (name for name, part in parts.items() if part.scorer is not None and part.weight(source))
    return (*rule, *others)


def require_scored_source(
    parts: Mapping[str, RewardPart],
    source: str,
    *,
    has_rule: bool,
    has_reward_model: bool,
    known: Collection[str],
) -> None:
    """``RewardError`` when nothing scores the rows of ``source``; ``known`` are sources that have a rule."""
    if has_reward_model and parts[REWARD_MODEL].weight(source) != 0:
        return
    if parts[RULE].weight(source) != 0 and not has_rule:
        raise unknown_source(source, known)
    if not asked_parts(parts, source, has_rule=has_rule):
        raise RewardError(
            f"data_source {source!r}: nothing scores it, every part of {KEY} has the weight 0 for it"
        )
