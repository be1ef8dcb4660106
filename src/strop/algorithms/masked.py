"""Sums, means, variances and whitening over the positions that a mask selects.

A mask has the shape of its values (or broadcasts to it) and holds 0 or 1, in any dtype. Padding may hold NaN
or infinity: values are selected by ``torch.where`` and never multiplied by the mask, because NaN x 0 is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor


def zero_masked(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` where the mask is 1, and 0 elsewhere.

    The gradient is 0 where the mask is 0. Call it on the inputs of a formula as well as on its result: the
    derivative of ``exp`` at NaN is NaN, and no later selection takes that back.
    """
    return torch.where(mask.bool(), values, 0)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """The sum of the selected values, over all of them or along ``dim``."""
    return zero_masked(values, mask).sum(dim=dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """The mean of the selected values, over all of them or along ``dim``; 0 where nothing is selected."""
    selected = mask.bool().expand_as(values)
    return masked_sum(values, selected, dim) / selected.sum(dim=dim).clamp(min=1)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """The unbiased variance of all selected values; 0 when fewer than two are selected."""
    selected = mask.bool().expand_as(values)
    deviations = values - masked_mean(values, selected)
    return masked_sum(deviations.square(), selected) / (selected.sum() - 1).clamp(min=1)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """``(values - mean) / sqrt(var + 1e-8)`` with the masked mean and the unbiased variance; 0 elsewhere.

    Of a single selected value, and of values that are all equal, the result is 0 (but for rounding).
    """
    mean, var = masked_mean(values, mask), masked_var(values, mask)
    return zero_masked((values - mean) * torch.rsqrt(var + 1e-8), mask)
