from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from strop.algorithms.policy_loss import value_loss


def test_value_loss_by_hand():
    # v = 2, R = 1, v clipped to 0.5: 1 or 0.25; v = 2, R = 3: 1 or 6.25; v = 0.2, R = 1, not clipped: 0.64;
    # v = -2, R = -3, v clipped to -0.5: 1 or 6.25
    values = torch.tensor([[2.0, 2.0, 0.2, -2.0]], requires_grad=True)
    returns, old_values = torch.tensor([[1.0, 3.0, 1.0, -3.0]]), torch.zeros(1, 4)
    result = value_loss(values, returns, old_values, torch.ones(1, 4), cliprange_value=0.5)
    assert_close(result.loss_BT, torch.tensor([[0.5, 3.125, 0.32, 3.125]]))
    assert result.clipped_BT.tolist() == [[0.0, 1.0, 0.0, 1.0]]
    result.loss_BT.sum().backward()
    assert values.grad is not None
    assert_close(values.grad, torch.tensor([[1.0, 0.0, -0.8, 0.0]]))  # v - R, and 0 where clipped
    assert not result.clipped_BT.requires_grad


def test_the_range_is_around_the_old_value():
    result = value_loss(
        torch.tensor([[5.0]]), torch.tensor([[6.0]]), torch.tensor([[4.0]]), torch.ones(1, 1),
        cliprange_value=0.25,
    )  # fmt: skip
    assert_close(result.loss_BT, torch.tensor([[1.53125]]))  # clipped to 4.25: 1.75^2 / 2


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_poisoned_padding_reaches_neither_loss_nor_gradient(poison):
    mask = torch.tensor([[1.0, 0.0, 1.0]])
    values = torch.tensor([[1.0, poison, 2.0]], requires_grad=True)
    other = torch.tensor([[0.0, poison, 2.0]])
    result = value_loss(values, other, other, mask, cliprange_value=10.0)
    assert result.loss_BT.tolist() == [[0.5, 0.0, 0.0]]
    result.loss_BT.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[1.0, 0.0, 0.0]]
