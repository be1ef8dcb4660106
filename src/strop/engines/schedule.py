"""The learning rate as a pure function of the iteration (NUMERICS: schedules and steps)."""

from __future__ import annotations

import math


def learning_rate_factor(
    iteration: int, *, total: int, warmup_ratio: float, style: str, min_ratio: float | None
) -> float:
    """What the base learning rate is multiplied with at ``iteration`` (counted from 0) of ``total``.

    Warm-up: (iteration + 1) / W over the first W = int(warmup_ratio x total) iterations. After it: 1
    (``constant``), a half cosine (``cosine``) or a line (``linear``) from 1 towards ``min_ratio`` (null: 0).
    """
    warmup = int(warmup_ratio * total)
    if iteration < warmup:
        return (iteration + 1) / warmup
    if style == "constant":
        return 1.0
    floor = min_ratio or 0.0
    progress = min((iteration - warmup) / max(total - warmup, 1), 1.0)
    if style == "cosine":
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    return floor + (1 - floor) * (1 - progress)
