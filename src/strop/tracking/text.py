"""The main figures of a run and their text form, shared by the console and ``strop view``."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

VALIDATION_PREFIX = "val/test_score/"


class Headline(NamedTuple):
    """A main figure: its label, and the names of metrics that may hold it, in order of preference."""

    label: str
    metrics: tuple[str, ...]

    def pick(self, metrics: Mapping[str, float]) -> float | None:
        """Return the first of its metrics that is present, else None."""
        return next((metrics[name] for name in self.metrics if name in metrics), None)


REWARD = Headline("reward", ("critic/score/mean", "objective/scores"))
KL = Headline("kl to reference", ("critic/kl", "actor/kl_loss"))
UPDATE_KL = Headline("kl of update", ("policy/approxkl_avg", "actor/ppo_kl"))
LENGTH = Headline("response length", ("response_length/mean", "val/sequence_lengths"))
THROUGHPUT = Headline("tokens/s", ("perf/throughput",))
HEADLINES = (
    REWARD,
    KL,
    UPDATE_KL,
    LENGTH,
    Headline("cut at the limit", ("response_length/clip_ratio",)),
    Headline("entropy", ("actor/entropy_loss", "objective/entropy")),
    Headline("policy loss", ("actor/pg_loss",)),
    Headline("policy clipped", ("actor/pg_clipfrac",)),
    Headline("policy gradient norm", ("actor/grad_norm",)),
    Headline("value loss", ("critic/vf_loss",)),
    Headline("explained variance", ("critic/vf_explained_var",)),
    Headline("value gradient norm", ("critic/grad_norm",)),
    Headline("learning rate", ("actor/lr", "lr")),
    THROUGHPUT,
)
LOSS = Headline("loss", ("train/loss",))
ACCURACY = Headline("accuracy", ("train/accuracy",))
VAL_LOSS = Headline("validation loss", ("val/loss",))
VAL_ACCURACY = Headline("validation accuracy", ("val/accuracy",))
SUPERVISED_HEADLINES = (
    LOSS,
    ACCURACY,
    VAL_LOSS,
    VAL_ACCURACY,
    Headline("gradient norm", ("grad_norm",)),
)
"""Figures of fine-tuning and reward modelling; reinforcement learning logs none of these metrics."""


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


def format_duration(seconds: float | None) -> str:
    """Return ``45s``, ``1m20s``, ``2h05m``, ``3d04h``; a question mark for None (unknown)."""
    if seconds is None or not math.isfinite(seconds):
        return "?"
    whole = max(round(seconds), 0)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days}d{hours % 24:02d}h"
    if hours:
        return f"{hours}h{minutes % 60:02d}m"
    return f"{minutes}m{whole % 60:02d}s" if minutes else f"{whole}s"


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Return ``values`` as at most ``width`` block characters, each the mean of an equal share of them."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    n_bars = min(width, len(finite))
    edges = [bar * len(finite) // n_bars for bar in range(n_bars + 1)]
    means = [sum(finite[start:end]) / (end - start) for start, end in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    blocks = "▁▂▃▄▅▆▇█"
    if high == low:
        return blocks[0] * n_bars
    return "".join(blocks[round((mean - low) / (high - low) * (len(blocks) - 1))] for mean in means)


_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Escape control characters, so that a model's answer cannot control the terminal."""
    return _CONTROL_CHARACTERS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
