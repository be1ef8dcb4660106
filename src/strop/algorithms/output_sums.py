"""Sums over the vocabulary that give log-probs and entropies, combined over blocks, splits and ranks.

Shapes: N tokens, V vocabulary; p = softmax(logits).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

LOWEST = torch.finfo(torch.float32).min
"""Highest logit of no words."""
VANISHES = -1000.0
"""Stands for the -inf of a forbidden word: its exp is 0 too, and 0 times it is 0 instead of NaN."""


class Known(NamedTuple):
    """Per token, float32."""

    log_prob_N: Tensor
    highest_N: Tensor
    """The highest logit; separate from log_sum_N, whose digits it would absorb."""
    log_sum_N: Tensor
    """log sum_V exp(logit - highest)"""
    entropy_N: Tensor


class Sums(NamedTuple):
    """Per token, float32, of the words of one rank or of all."""

    picked_N: Tensor
    """The id's logit; 0 if it is another rank's word."""
    highest_N: Tensor
    sum_N: Tensor
    """sum_V exp(logit - highest)"""
    weighted_N: Tensor
    """sum_V (logit - highest) exp(logit - highest)"""

    def lowered(self, highest_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return picked, sum and weighted, relative to a logit that is not below the highest."""
        # LOWEST - highest would be -inf, and -inf x a sum of 0 NaN; exp(-1000) is 0 all the same
        down_N = (self.highest_N - highest_N).clamp_(min=VANISHES)
        down_exp_N = down_N.exp()
        return self.picked_N, self.sum_N * down_exp_N, (self.weighted_N + down_N * self.sum_N) * down_exp_N

    def over_ranks(self, group: dist.ProcessGroup) -> Sums:
        """Combine the sums of every rank's words. Collective."""
        highest_N = self.highest_N.clone()
        dist.all_reduce(highest_N, dist.ReduceOp.MAX, group=group)
        sums_3N = torch.stack(self.lowered(highest_N))
        dist.all_reduce(sums_3N, group=group)
        return Sums(sums_3N[0], highest_N, sums_3N[1], sums_3N[2])

    def known(self) -> Known:
        """Return the log-probs and entropies of sums over all words."""
        log_sum_N = self.sum_N.log()
        # the two large numbers first: their difference is exact where they are near each other
        log_prob_N = self.picked_N - self.highest_N - log_sum_N
        return Known(log_prob_N, self.highest_N, log_sum_N, log_sum_N - self.weighted_N / self.sum_N)


class Upstream(NamedTuple):
    """Inputs of the logits' gradient, per token."""

    ids_N: Tensor
    highest_N: Tensor
    log_sum_N: Tensor
    entropy_N: Tensor
    log_prob_gradient_N: Tensor
    entropy_gradient_N: Tensor | None
