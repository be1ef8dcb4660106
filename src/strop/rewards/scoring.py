"""Scoring samples one after another, up to the point where too many have failed."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

from strop.errors import RewardError
from strop.rewards.error_budget import ErrorBudget
from strop.rewards.process import RewardProcess
from strop.rewards.records import Outcome, Sample

logger = logging.getLogger(__name__)

_SHOWN_CHARACTERS = 200


def score_samples(
    process: RewardProcess, samples: Sequence[Sample], has_rule: Sequence[bool], budget: ErrorBudget
) -> list[Outcome | None]:
    """The outcome of every sample that a function scores, None for the others.

    Raises:
        RewardError: a score (or a part of it) that is NaN or infinite, naming the sample; or more failed
            samples than ``budget`` bears, with the first traceback.
    """
    budget.begin(sum(has_rule))
    outcomes: list[Outcome | None] = []
    failed, first_error = 0, ""
    for row, sample in enumerate(samples):
        outcome = process.evaluate(sample) if has_rule[row] else None
        outcomes.append(outcome)
        if outcome is None:
            continue
        _require_finite(outcome, name_sample(row, sample))
        if outcome.error:
            failed += 1
            if failed == 1:
                first_error = f"{name_sample(row, sample)}:\n{outcome.error}"
                logger.warning("could not score %s", first_error)
        if budget.count(bool(outcome.error)):
            raise RewardError(
                f"too many samples cannot be scored: {failed} of the first {row + 1} of this batch of "
                f"{len(samples)} (reward_model.max_error_rate={budget.max_rate:g}). "
                f"The first was {first_error}"
            )
    return outcomes


def name_sample(row: int, sample: Sample) -> str:
    """A sample in the words of an error text."""
    index = sample.extra_info.get("index") if isinstance(sample.extra_info, Mapping) else None
    known = "" if index is None else f", extra_info.index={index}"
    text = sample.solution_str
    shown = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
    return f"sample {row} (data_source={sample.data_source!r}{known}, response={shown!r})"


def _require_finite(outcome: Outcome, name: str) -> None:
    found = {"score": outcome.score, **outcome.parts}
    bad = ", ".join(f"{part}={value}" for part, value in found.items() if not math.isfinite(value))
    if bad:
        raise RewardError(f"the reward function returned {bad} for {name}")
