from __future__ import annotations

import math

import pytest

from strop.engines.base import learning_rate_factor


def _factors(style: str, *, total: int = 10, warmup_ratio: float = 0.0, min_ratio: float | None = None):
    return [
        learning_rate_factor(i, total=total, warmup_ratio=warmup_ratio, style=style, min_ratio=min_ratio)
        for i in range(total)
    ]


@pytest.mark.parametrize(
    ("style", "options", "expected"),
    [
        ("constant", {"warmup_ratio": 0.4}, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]),
        ("constant", {"warmup_ratio": 0.09}, [1.0] * 10),  # less than one iteration
        ("linear", {"total": 4}, [1, 0.75, 0.5, 0.25]),
        ("linear", {"total": 4, "min_ratio": 0.2}, [1, 0.8, 0.6, 0.4]),
    ],
)
def test_warm_up_and_linear_decay_by_hand(style, options, expected):
    assert _factors(style, **options) == pytest.approx(expected)


def test_cosine_follows_half_a_period_after_the_warm_up():
    found = _factors("cosine", warmup_ratio=0.2, min_ratio=0.1)
    assert found[:2] == [0.5, 1.0]
    assert found[2:] == pytest.approx([0.1 + 0.45 * (1 + math.cos(math.pi * k / 8)) for k in range(8)])
