"""The main figures of a run and their text form, shared by the console and ``strop view``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

VALIDATION_PREFIX = "val/test_score/"


class Headline(NamedTuple):
    """A main figure of a run."""

    label: str
    metric: str
    short: str = ""
    """Label in a plain line; empty: none."""
    of_ratios: bool = False
    """True for a figure that is 0 where all ratios of new to old probability are 1: one on-policy step."""


REWARD = "critic/score/mean"
_UPDATE_KL = "policy/approxkl_avg"
HEADLINES = (
    # Fine-tuning, preferences and reward modelling; reinforcement learning logs none of these.
    Headline("loss", "train/loss", "loss"),
    Headline("accuracy", "train/accuracy", "accuracy"),
    Headline("accuracy", "train/rewards/accuracy", "accuracy"),
    Headline("margin", "train/margin", "margin"),
    Headline("margin", "train/rewards/margin", "margin"),
    Headline("validation loss", "val/loss", "val loss"),
    Headline("validation accuracy", "val/accuracy", "val accuracy"),
    Headline("validation accuracy", "val/rewards/accuracy", "val accuracy"),
    Headline("validation margin", "val/margin", "val margin"),
    Headline("validation margin", "val/rewards/margin", "val margin"),
    Headline("loss after the last update", "final/loss", "final loss"),
    Headline("accuracy after the last update", "final/accuracy", "final accuracy"),
    Headline("accuracy after the last update", "final/rewards/accuracy", "final accuracy"),
    Headline("margin after the last update", "final/margin", "final margin"),
    Headline("margin after the last update", "final/rewards/margin", "final margin"),
    Headline("gradient norm", "grad_norm"),
    # Reinforcement learning.
    Headline("reward", REWARD, "reward"),
    Headline("kl to reference", "critic/kl", "kl"),
    Headline("kl to teacher", "teacher/kl", "teacher kl"),
    Headline("kl of update", _UPDATE_KL, "update kl", of_ratios=True),
    Headline("response length", "response_length/mean", "len"),
    Headline("cut at the limit", "response_length/clip_ratio"),
    Headline("entropy", "actor/entropy_loss"),
    Headline("policy loss", "actor/pg_loss"),
    Headline("policy clipped", "actor/pg_clipfrac", of_ratios=True),
    Headline("policy gradient norm", "actor/grad_norm"),
    Headline("value loss", "critic/vf_loss"),
    Headline("explained variance", "critic/vf_explained_var"),
    Headline("value gradient norm", "critic/grad_norm"),
    Headline("learning rate", "lr"),
    Headline("tokens/s", "perf/throughput", "tok/s"),
)


def headlines(steps: Sequence[Mapping[str, float]]) -> list[Headline]:
    """Return those of ``HEADLINES`` that ``steps`` have, less those of ratios if all ratios are 1."""
    has_ratios = any(step.get(_UPDATE_KL) for step in steps)
    return [
        headline
        for headline in HEADLINES
        if (has_ratios or not headline.of_ratios) and any(headline.metric in step for step in steps)
    ]


def shown_names(steps: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Return the name under which each metric is shown: of those with the same values in every step, one.

    Values that never change count as different ones: errors and timeouts may both be 0.
    """
    shown: dict[Any, str] = {}
    names, main = names_in_order(steps), {headline.metric for headline in HEADLINES}
    for name in sorted(names, key=lambda name: name not in main):
        values = tuple(step.get(name) for step in steps)
        shown[name] = shown.setdefault(values, name) if len({*values} - {None}) > 1 else name
    return {name: shown[name] for name in names}


def validation_scores(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return score by data source, from the ``val/test_score/<data_source>`` in ``metrics``."""
    return {
        name.removeprefix(VALIDATION_PREFIX): value
        for name, value in metrics.items()
        if name.startswith(VALIDATION_PREFIX)
    }


def names_in_order(steps: Iterable[Mapping[str, float]]) -> list[str]:
    """Return the names of all metrics in order of first appearance, without the step number."""
    return list(dict.fromkeys(name for step in steps for name in step if name != "step"))


def format_number(value: float | None) -> str:
    """Return three or four significant figures: 1,234 12.3 0.123 4.5e-06 nan inf; a dash for None."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(float(value))
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    size = abs(value)
    if size < 0.001 or size >= 1e7:
        return f"{value:.2e}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.1f}" if size >= 10 else f"{value:.3f}"


_LARGEST = 1e300
"""Sums and differences of what is drawn are finite."""


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Return ``values`` as at most ``width`` block characters, each the mean of an equal share of them."""
    finite = [value for value in values if abs(value) < _LARGEST]
    if not finite:
        return ""
    n_bars = min(width, len(finite))
    # integers: shares differ by one value at most, and none is empty
    edges = [bar * len(finite) // n_bars for bar in range(n_bars + 1)]
    means = [sum(finite[start:end]) / (end - start) for start, end in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    blocks = "▁▂▃▄▅▆▇█"
    if high == low:
        return blocks[0] * n_bars
    return "".join(blocks[round((mean - low) / (high - low) * (len(blocks) - 1))] for mean in means)
