"""The clipped value loss per token, before aggregation. Shapes: B samples, T response tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from strop.algorithms.masked import zero_masked


class ValueLoss(NamedTuple):
    """Per token, 0 where the mask is 0; only the loss has a gradient."""

    loss_BT: Tensor
    clipped_BT: Tensor
    """1 where the clipped value gave the loss, else 0"""


def value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor, response_mask: Tensor, *, cliprange_value: float
) -> ValueLoss:
    """0.5 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) with c = ``cliprange_value``; all tensors
    [B,T].

    The value analogue of the policy's clip, as in OpenAI baselines' ppo2; Huang et al., arXiv:2403.17031,
    keep it for language models.
    """
    values_BT = zero_masked(values, response_mask)
    returns_BT = zero_masked(returns, response_mask)
    old_values_BT = zero_masked(old_values, response_mask)
    near_BT = values_BT.clamp(old_values_BT - cliprange_value, old_values_BT + cliprange_value)
    plain_BT = (values_BT - returns_BT).square()
    bounded_BT = (near_BT - returns_BT).square()
    return ValueLoss(
        loss_BT=zero_masked(0.5 * torch.maximum(plain_BT, bounded_BT), response_mask),
        clipped_BT=zero_masked((bounded_BT > plain_BT).to(values.dtype), response_mask),
    )
