"""Statistics over groups of samples, usually the n responses to one prompt. Shapes: B samples.

Members of a group are those with equal ``uid``, wherever they stand: batches are shuffled, balanced and
filtered.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np


class GroupStatistics(NamedTuple):
    """For each sample, the statistics of the group that it is in; float64."""

    size_B: Tensor
    mean_B: Tensor
    std_B: Tensor
    """unbiased; 0 in a group of one"""


def group_statistics(scores_B: Tensor, uid: Sequence[Hashable] | np.ndarray) -> GroupStatistics:
    """Size, mean and unbiased standard deviation of each sample's group.

    In float64: in float32, the rounding of a mean of equal scores such as 0.1, divided by a standard
    deviation that is rounding as well, makes advantages out of nothing.

    Raises:
        ValueError: there is not one uid for each sample.
    """
    if len(uid) != len(scores_B):
        raise ValueError(f"{len(uid)} uids do not fit {len(scores_B)} samples")
    numbers: dict[Hashable, int] = {}
    members = [numbers.setdefault(one, len(numbers)) for one in uid]
    index_B = torch.tensor(members, dtype=torch.int64, device=scores_B.device)

    def group_sum(values_B: Tensor) -> Tensor:
        totals_G = values_B.new_zeros(len(numbers)).index_add(0, index_B, values_B)
        return totals_G[index_B]

    scores_B = scores_B.double()
    size_B = group_sum(torch.ones_like(scores_B))
    mean_B = group_sum(scores_B) / size_B
    variance_B = group_sum((scores_B - mean_B).square()) / (size_B - 1).clamp(min=1)
    return GroupStatistics(size_B, mean_B, variance_B.sqrt())
