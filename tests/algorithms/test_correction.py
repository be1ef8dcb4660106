from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from strop.algorithms.correction import rollout_is_weights, rollout_statistics

NAN, INF = math.nan, math.inf
LN2, LN3 = math.log(2), math.log(3)
MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
ROLLOUT = torch.tensor([[-2.0, -2.0, NAN], [-2.0, INF, -2.0]])
# ratios 3, 1/2 in row 1; 1, 1/3 in row 2
OLD = torch.tensor([[-2.0 + LN3, -2.0 - LN2, INF], [-2.0, NAN, -2.0 - LN3]])


def test_token_weights_by_hand():
    weights = rollout_is_weights(OLD, ROLLOUT, MASK, level="token", threshold=2.0)
    assert_close(weights, torch.tensor([[2.0, 0.5, 0.0], [1.0, 0.0, 1 / 3]]))  # 3 is truncated to 2


def test_sequence_weights_by_hand():
    weights = rollout_is_weights(OLD, ROLLOUT, MASK, level="sequence", threshold=2.0)
    assert_close(weights, torch.tensor([[1.5, 1.5, 0.0], [1 / 3, 0.0, 1 / 3]]))  # 3 x 1/2; 1 x 1/3
    truncated = rollout_is_weights(OLD, ROLLOUT, MASK, level="sequence", threshold=1.2)
    assert_close(truncated, torch.tensor([[1.2, 1.2, 0.0], [1 / 3, 0.0, 1 / 3]]))


@pytest.mark.parametrize(
    ("level", "bounds", "expected"),
    [  # token: 3, 1/2 and 1, 1/3; sequence: 3/2 and 1/3
        ("token", {"threshold": 2.0}, [[0, 0.5, 0], [1, 0, 1 / 3]]),
        ("token", {"threshold": 4.0, "threshold_low": 0.4}, [[3, 0.5, 0], [1, 0, 0]]),
        ("token", {"threshold": 1.0, "threshold_low": 1.0}, [[0, 0, 0], [1, 0, 0]]),  # bounds are inside
        ("sequence", {"threshold": 1.2}, [[0, 0, 0], [1 / 3, 0, 1 / 3]]),
        ("sequence", {"threshold": 2.0, "threshold_low": 0.4}, [[1.5, 1.5, 0], [0, 0, 0]]),
    ],
)
def test_masked_weights_by_hand(level, bounds, expected):
    weights = rollout_is_weights(OLD, ROLLOUT, MASK, level=level, mode="mask", **bounds)
    assert_close(weights, torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_are_finite_and_detached(level):
    old = torch.tensor([[500.0, 500.0]], requires_grad=True)
    weights = rollout_is_weights(old, torch.zeros(1, 2), torch.ones(1, 2), level=level, threshold=1e30)
    assert_close(weights, torch.full((1, 2), 4.8516520e8))  # e^20
    assert not weights.requires_grad


def test_statistics_by_hand():
    # e^-2 = 0.1353353; differences in units of it: 2, 1/2, 0, 2/3: mean 19/24, largest 2
    # kl: 3 - 1 - ln 3; 1/2 - 1 + ln 2; 0; 1/3 - 1 + ln 3: sum 5/6 + ln 2 = 1.5264805; / 4
    # weights 3, 1/2, 1, 1/3: sum 29/6, squares 9 + 1/4 + 1 + 1/9 = 373/36; (841/36) / (4 x 373/36) = 841/1492
    found = rollout_statistics(OLD, ROLLOUT, MASK)
    assert found.probs_diff_mean == pytest.approx(0.1071405, abs=1e-6)
    assert found.probs_diff_max == pytest.approx(0.2706706, abs=1e-6)
    assert found.kl == pytest.approx(0.3816201, abs=1e-6)
    assert found.effective_sample_size == pytest.approx(841 / 1492, abs=1e-6)


def test_a_sampler_that_agrees_differs_by_nothing():
    same = torch.tensor([[-1.0, -2.0, NAN]])
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    assert rollout_statistics(same, same, mask) == (0.0, 0.0, 0.0, 1.0)
    assert rollout_statistics(same, same, torch.zeros_like(mask)) == (0.0, 0.0, 0.0, 1.0)


def test_one_token_that_outweighs_all_others_leaves_one_sample_of_n():
    old, rollout = torch.tensor([[0.0, -100.0, -100.0, -100.0]]), torch.tensor([[-100.0, 0.0, 0.0, 0.0]])
    found = rollout_statistics(old, rollout, torch.ones(1, 4))
    assert found.effective_sample_size == pytest.approx(0.25)
    assert found.probs_diff_max == pytest.approx(1.0)
