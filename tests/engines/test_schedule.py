from __future__ import annotations

import math

import pytest

from strop.engines.base import learning_rate_factor


def _factors(
    style: str,
    *,
    total: int = 10,
    warmup_ratio: float = 0.0,
    min_ratio: float | None = None,
    steps: int = -1,
    first: int = 0,
):
    return [
        learning_rate_factor(
            i,
            total=total,
            ratio=warmup_ratio,
            steps=steps,
            first=first,
            style=style,
            min_ratio=min_ratio,
        )
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


@pytest.mark.parametrize(
    ("style", "options", "expected"),
    [
        ("constant", {"steps": 2, "warmup_ratio": 0.9}, [0.5, 1, 1, 1, 1, 1]),
        ("constant", {"steps": 0, "warmup_ratio": 0.9}, [1] * 6),
        ("constant", {"warmup_ratio": 0.5, "first": 2}, [1 / 3, 2 / 3, 1, 1, 1, 1]),
        ("constant", {"steps": 4, "first": 2}, [0, 0, 0.25, 0.5, 0.75, 1]),
        ("linear", {"steps": 2, "first": 2, "min_ratio": 0.2}, [0, 0, 0.5, 1, 1, 0.6]),
        ("cosine", {"steps": 1, "first": 1}, [0, 1, 1, 0.853553, 0.5, 0.146447]),
        ("linear", {"steps": 9}, [1 / 9, 2 / 9, 3 / 9, 4 / 9, 5 / 9, 6 / 9]),
    ],
)
def test_steps_of_warm_up_win_over_the_share_and_count_from_the_first_update(style, options, expected):
    # before the first update the model has no rate: the values there are not used
    first = options.get("first", 0) if options.get("steps", -1) >= 0 else 0
    assert _factors(style, total=6, **options)[first:] == pytest.approx(expected[first:], abs=1e-6)


def test_cosine_follows_half_a_period_after_the_warm_up():
    found = _factors("cosine", warmup_ratio=0.2, min_ratio=0.1)
    assert found[:2] == [0.5, 1.0]
    assert found[2:] == pytest.approx([0.1 + 0.45 * (1 + math.cos(math.pi * k / 8)) for k in range(8)])
