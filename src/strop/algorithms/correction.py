"""The difference between the sampler's distribution and the trainer's.

Shapes: B samples, T response tokens.

A sampler with other kernels, precision or older weights computes other log-probs for the same tokens than the
trainer. Every run that has both measures the difference; importance weights can correct for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from strop.algorithms.aggregation import log_ratio, masked_mean, masked_sum, zero_masked
from strop.algorithms.kl import k3

if TYPE_CHECKING:
    from torch import Tensor


def rollout_is_weights(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    *,
    level: str,
    threshold: float,
    mode: str = "truncate",
    threshold_low: float | None = None,
) -> Tensor:
    """Return weights w = exp(old - rollout) [B,T] for the policy loss per token, bounded and detached.

    Masked slots are 0. Exponents are clamped to +-20.

    Args:
        old_log_prob: [B,T], of the policy before the update.
        rollout_log_prob: [B,T], as the sampler reported them.
        response_mask: [B,T]; rows are whole sequences.
        level: ``token``: the ratio of each token, a biased correction of low variance (Yao et al., "Your
            Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025). ``sequence``: that of
            the whole sequence, exp(sum over its tokens), on each of its tokens.
        threshold: upper bound.
        mode: ``truncate``: min(w, threshold), truncated importance sampling (Ionides, 2008). ``mask``: 0 for
            w above the threshold or below ``threshold_low``, and w itself between them (IcePop: Ling team,
            arXiv:2510.18855).
        threshold_low: lower bound of ``mask``; None: none.
    """
    with torch.no_grad():
        d_BT = zero_masked(log_ratio(old_log_prob, rollout_log_prob), response_mask)
        if level == "sequence":
            # summed before the clamp: the bound is one on the sequence's ratio, not on its tokens'
            d_BT = d_BT.sum(-1, keepdim=True).expand_as(d_BT)
        weights_BT = d_BT.clamp(-20, 20).exp()
        if mode == "truncate":
            return zero_masked(weights_BT.clamp(max=threshold), response_mask)
        # a weight of 0 leaves the token in the loss's denominator, as in IcePop; verl's rollout_rs does not
        within_BT = (weights_BT <= threshold) & (weights_BT >= (threshold_low or 0.0))
        return zero_masked(weights_BT, response_mask * within_BT)


class RolloutStatistics(NamedTuple):
    """Distance of the trainer's probabilities of the sampled tokens from the sampler's."""

    probs_diff_mean: float
    """mean over tokens of |exp(old) - exp(rollout)|"""
    probs_diff_max: float
    """largest |exp(old) - exp(rollout)|"""
    kl: float
    """KL(sampler || trainer) per token, estimated by exp(d) - 1 - d with d = old - rollout; never negative"""
    effective_sample_size: float
    """(sum w)^2 / (N sum w^2), w = exp(d) per token: 1 if both agree, 1/N if one token outweighs all"""


def rollout_statistics(
    old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor
) -> RolloutStatistics:
    """Compare the trainer's log-probs [B,T] of the sampled tokens with the sampler's, over all tokens.

    d is clamped to +-20. The effective sample size is that of Kish, 1965, as a fraction of the tokens.
    Without tokens, the result is 0, 0, 0, 1.
    """
    with torch.no_grad():
        old_BT = zero_masked(old_log_prob, response_mask)
        rollout_BT = zero_masked(rollout_log_prob, response_mask)
        difference_BT = (old_BT.exp() - rollout_BT.exp()).abs()
        d_BT = log_ratio(old_BT, rollout_BT).clamp(-20, 20)
        weight_BT = d_BT.exp().double()  # squares of exp(20), summed
        total = masked_sum(weight_BT, response_mask)
        total_of_squares = masked_sum(weight_BT.square(), response_mask)
        n_tokens = int(response_mask.bool().sum())
        return RolloutStatistics(
            probs_diff_mean=masked_mean(difference_BT, response_mask).item(),
            probs_diff_max=difference_BT.max().item(),
            kl=masked_mean(k3(-d_BT), response_mask).item(),
            effective_sample_size=(total.square() / (n_tokens * total_of_squares)).item()
            if n_tokens
            else 1.0,
        )
