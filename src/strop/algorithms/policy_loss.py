"""Policy losses per token, before aggregation: ppo, gspo and cispo; and the clipped value loss.

Shapes: B samples, T response tokens.

A policy loss is a pure function that returns a ``PolicyLoss``. The names of its parameters select its inputs:

    log_prob [B,T]                                   log-probs under the policy being updated, with a gradient
    old_log_prob, advantages, response_mask [B,T]    before the update, without a gradient
    clip_ratio_low, clip_ratio_high, clip_ratio_c    keys of ``actor_rollout_ref.actor``
    entropy [B,T]                                    entropy of the policy being updated, with a gradient
    one of ``EXTRA_INPUTS`` [B,T]                    that column of the batch

Any other parameter takes its value from ``actor_rollout_ref.actor.policy_loss_kwargs``, or has a default.
``**kwargs`` takes the first seven.

The loss is not averaged: ``aggregation.aggregate`` does that, after the caller has multiplied in any weights
of ``correction``. k = log_prob - old_log_prob is clamped to +-20 everywhere, so that a ratio is finite.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from strop.algorithms.aggregation import log_ratio, masked_mean, zero_masked
from strop.algorithms.kl import k3
from strop.algorithms.registry import register, resolve, with_options
from strop.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


class PolicyLoss(NamedTuple):
    """Results per token, 0 where the mask is 0; only the loss has a gradient."""

    loss_BT: Tensor
    ratio_BT: Tensor
    """unclipped importance ratio exp(k); the sequence's in gspo"""
    clipped_BT: Tensor
    """1 where clipping took effect"""
    approx_kl_BT: Tensor
    """exp(k) - 1 - k, a non-negative estimate of KL(old || new)"""
    metrics_BT: Mapping[str, Tensor] = MappingProxyType({})
    """further metrics: the mean of ``name`` over tokens is recorded as ``actor/name``"""


PolicyLossFunction = Callable[..., PolicyLoss]

POLICY_LOSSES: dict[str, PolicyLossFunction] = {}

_TENSORS = ("log_prob", "old_log_prob", "advantages", "response_mask")
_CLIPS = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
_TOKEN_COLUMNS = ("rollout_log_probs", "rollout_is_weights", "ref_log_prob", "values", "returns")
INPUTS = frozenset((*_TENSORS, *_CLIPS))
EXTRA_INPUTS = frozenset((*_TOKEN_COLUMNS, "entropy", "token_level_scores", "token_level_rewards"))
"""Further inputs, which only a parameter of that name takes."""


def register_policy_loss(name: str) -> Callable[[PolicyLossFunction], PolicyLossFunction]:
    """Register a function as ``actor_rollout_ref.actor.policy_loss=name``."""
    return register(POLICY_LOSSES, name, "policy loss")


def get_policy_loss(
    name_or_import_path: str, kwargs: Mapping[str, Any] | None = None, *, absent: Collection[str] = ()
) -> PolicyLossFunction:
    """Return the policy loss of that name or import path (``package.module:function``), given ``kwargs``.

    ``absent`` names the extra inputs that this run does not compute.

    Raises:
        ConfigError: it is not known, cannot be imported, requires an input that is not available, or has no
            parameter for one of ``kwargs``.
    """
    key = "actor_rollout_ref.actor.policy_loss"
    policy_loss = resolve(name_or_import_path, POLICY_LOSSES, key=key)
    computed = INPUTS | EXTRA_INPUTS
    available = computed - set(absent)
    return with_options(
        policy_loss, kwargs or {}, key=key, name=name_or_import_path, computed=computed, available=available
    )


def extra_inputs(policy_loss: PolicyLossFunction) -> list[str]:
    """Return the ``EXTRA_INPUTS`` that the policy loss has parameters for."""
    return sorted(EXTRA_INPUTS & inspect.signature(policy_loss).parameters.keys())


@register_policy_loss("ppo")
def ppo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float | None = None,
) -> PolicyLoss:
    """Compute the clipped surrogate: Schulman et al., arXiv:1707.06347, equation 7.

    max(-A ratio, -A clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)); two bounds as in DAPO (Yu et al.,
    arXiv:2503.14476). ``clip_ratio_c`` > 1 bounds the loss of bad tokens that have become likely: at most
    -A clip_ratio_c where A < 0 (dual clip, Ye et al., arXiv:1912.09729).
    """
    k_BT, advantages_BT = _clean(log_prob, old_log_prob, advantages, response_mask)
    ratio_BT = k_BT.exp()
    loss_BT, clipped_BT = _clipped_surrogate(
        ratio_BT, advantages_BT, clip_ratio_low, clip_ratio_high, clip_ratio_c
    )
    return _masked(loss_BT, ratio_BT, clipped_BT, k_BT, response_mask)


@register_policy_loss("gspo")
def gspo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float | None = None,
) -> PolicyLoss:
    """Compute the clipped surrogate of whole sequences: Zheng et al., arXiv:2507.18071, equation 5.

    The ratio of a sequence is exp(mean of k over its tokens), its advantage the mean over its tokens. Each
    token gets the loss of its sequence, so that the aggregation ``seq-mean-token-mean`` gives the paper's
    objective; ``token-mean`` weighs sequences by their length. The paper's clip ratios are of the order of
    3e-4.
    """
    k_BT, advantages_BT = _clean(log_prob, old_log_prob, advantages, response_mask)
    ratio_B1 = masked_mean(k_BT, response_mask, dim=-1).unsqueeze(-1).exp()
    advantages_B1 = masked_mean(advantages_BT, response_mask, dim=-1).unsqueeze(-1)
    loss_B1, clipped_B1 = _clipped_surrogate(
        ratio_B1, advantages_B1, clip_ratio_low, clip_ratio_high, clip_ratio_c
    )
    return _masked(
        loss_B1.expand_as(k_BT), ratio_B1.expand_as(k_BT), clipped_B1.expand_as(k_BT), k_BT, response_mask
    )


@register_policy_loss("cispo")
def cispo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float | None = None,
) -> PolicyLoss:
    """Compute the policy gradient with clipped importance weights: MiniMax, arXiv:2506.13585.

    -sg(clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)) A log_prob, with sg for stop-gradient: a clipped
    token keeps its gradient. The paper sets no lower bound: clip_ratio_low = 1.

    Raises:
        ConfigError: clip_ratio_c is set; there is no surrogate to bound.
    """
    if clip_ratio_c is not None:
        raise ConfigError(
            f"actor_rollout_ref.actor.clip_ratio_c={clip_ratio_c} has no meaning for cispo; set it to null"
        )
    k_BT, advantages_BT = _clean(log_prob, old_log_prob, advantages, response_mask)
    # the gradient flows through log_prob alone (sg in the formula), so a clipped token keeps it
    ratio_BT = k_BT.detach().exp()
    weight_BT = ratio_BT.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    loss_BT = -weight_BT * advantages_BT * log_prob
    return _masked(loss_BT, ratio_BT, weight_BT != ratio_BT, k_BT, response_mask)


def _clean(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the clamped k [B,T] and the advantages, both 0 where the mask is 0."""
    # inputs are masked, not just results: exp's derivative at a padded NaN is NaN, and NaN x 0 is NaN
    k_BT = log_ratio(zero_masked(log_prob, response_mask), zero_masked(old_log_prob, response_mask))
    # exp(20) = 4.9e8; float32 overflows at exp(88.7), and inf x 0 advantage is NaN
    return k_BT.clamp(-20, 20), zero_masked(advantages, response_mask)


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float, c: float | None
) -> tuple[Tensor, Tensor]:
    """Return the loss, and where a clip has replaced -A ratio by a bound without gradient."""
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - low, 1 + high)
    # strictly greater: within the bounds both are equal, and so are their gradients
    loss, clipped = torch.maximum(plain, bounded), bounded > plain
    if c is None:
        return loss, clipped
    if c <= 1:
        raise ConfigError(f"actor_rollout_ref.actor.clip_ratio_c={c} must be above 1")
    # without a ceiling: A < 0 and a ratio of 1e4 give one token a loss of 1e4, which max() keeps
    ceiling = torch.where(advantages < 0, -advantages * c, torch.inf)
    return torch.minimum(loss, ceiling), clipped | (loss > ceiling)


def _masked(loss: Tensor, ratio: Tensor, clipped: Tensor, k: Tensor, response_mask: Tensor) -> PolicyLoss:
    k = k.detach()
    return PolicyLoss(
        loss_BT=zero_masked(loss, response_mask),
        ratio_BT=zero_masked(ratio.detach(), response_mask),
        clipped_BT=zero_masked(clipped.to(loss.dtype), response_mask),
        # k3 of KL(old || new): the samples are the old policy's, and exp(k) is new / old
        approx_kl_BT=zero_masked(k3(-k), response_mask),
    )


class ValueLoss(NamedTuple):
    """Results per token, 0 where the mask is 0; only the loss has a gradient."""

    loss_BT: Tensor
    clipped_BT: Tensor
    """1 where the loss is that of the clipped value"""


def value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor, response_mask: Tensor, *, cliprange_value: float
) -> ValueLoss:
    """Return 0.5 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2), c = ``cliprange_value``; all [B,T].

    The analogue of the policy's clip, as in OpenAI baselines' ppo2; Huang et al., arXiv:2403.17031, keep it
    for language models.
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
