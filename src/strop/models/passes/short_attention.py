"""Attention of short sequences in bfloat16 on a CPU, by batched matrix products.

torch's kernel for CPUs works on blocks that are larger than such sequences, is slower in bfloat16 than in
float32, and computes scores a second time in its backward pass. Here scores and their softmax are float32;
probabilities, kept for the backward pass, and gradients are rounded to bfloat16 for the products.

Shapes: S sequences of K keys with T queries each, Q query heads, G key-value heads, R = Q / G, D head size.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from strop.torch_private import multiplies_bfloat16, softmax_backward

_LONGEST = 256
"""Longest sequence: its probabilities take the memory of the kernel's float32 queries and outputs."""
_NARROWEST = 64
"""Head size: forward passes with 32 take 1.1 to 1.2 of the kernel's time, with 64 they take 0.6 to 0.9."""
_FEWEST, _MOST = 1 << 15, 1 << 23
"""Scores of one call, at least, and of one product, at most. Fewer are not worth this many operations; up to
6 million, forward and backward are 1.5 to 1.9 times as fast as torch's kernel with casts."""


def attends_by_products(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return True if ``attention_by_products`` is faster: query [S, Q, T, D], key and value [S, G, K, D]."""
    sequences, heads, queries, width = query.shape
    keys = key.shape[2]
    return (
        query.device.type == "cpu"
        and query.dtype == key.dtype == value.dtype == torch.bfloat16
        and keys <= _LONGEST
        and heads * queries * keys <= _MOST
        and sequences * heads * queries * keys >= _FEWEST
        and _NARROWEST <= width == value.shape[3]
        and multiplies_bfloat16()
    )


def attention_by_products(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Attend: query [S, Q, T, D], key and value [S, G, K, D] -> [S, T, Q, D].

    ``mask`` [1 or S, 1, T, K] is float32, added to the scores; None: causal, with T = K. ``scaling``
    multiplies the scores; None: 1 / sqrt(D).
    """
    if mask is None:
        mask = _causal(query.shape[2])
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    sequences, heads, queries, _ = query.shape
    at_once = max(_MOST // (heads * queries * key.shape[2]), 1)
    parts = [states.transpose(1, 2).split(at_once) for states in (query, key, value)]
    masks = mask[:, 0].expand(sequences, -1, -1).split(at_once)
    outputs = [_Attention.apply(*part, scaling) for part in zip(*parts, masks, strict=True)]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


@functools.lru_cache(maxsize=64)
def _causal(length: int) -> Tensor:
    return torch.full((1, 1, length, length), -torch.inf).triu_(1)


class _Attention(torch.autograd.Function):
    """Query [S, T, Q, D], key and value [S, K, G, D], mask [S, T, K] -> [S, T, Q, D]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
        (sequences, queries, heads, _), (_, keys, groups, _) = query.shape, key.shape
        # All queries of a group are rows of one matrix, T x R: keys and values are not repeated for them.
        query, key, value = (_by_group(states, groups) for states in (query, key, value))
        scores = mask[:, None, :, None].expand(-1, groups, -1, heads // groups, -1)
        scores = scores.reshape(len(query), -1, keys)
        if scores.data_ptr() == mask.data_ptr():  # reshape copies, unless there is one sequence and head
            scores = scores.clone()
        scores.baddbmm_(query.float(), key.float().transpose(1, 2), alpha=scaling)
        probs = torch.softmax(scores, -1).to(value.dtype)
        ctx.save_for_backward(query, key, value, probs)
        ctx.scaling, ctx.sizes = scaling, (sequences, queries, keys)
        return _by_token(torch.bmm(probs, value), sequences, queries)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, probs = ctx.saved_tensors
        sequences, queries, keys = ctx.sizes
        gradient = _by_group(gradient, len(key) // sequences)
        value_gradient = torch.bmm(probs.transpose(1, 2), gradient)
        through_probs = torch.bmm(gradient, value.transpose(1, 2))
        # softmax's backward has no public name; autograd's would keep float32 probabilities, twice the memory
        through_scores = softmax_backward(through_probs, probs)
        query_gradient = torch.bmm(through_scores, key).mul_(ctx.scaling)
        key_gradient = torch.bmm(through_scores.transpose(1, 2), query).mul_(ctx.scaling)
        return (
            _by_token(query_gradient, sequences, queries),
            _by_token(key_gradient, sequences, keys),
            _by_token(value_gradient, sequences, keys),
            None,
            None,
        )


def _by_group(states: Tensor, groups: int) -> Tensor:
    """Convert [S, L, G x R, D] to [S x G, L x R, D]; no copy if G is 1."""
    sequences, _, heads, width = states.shape
    grouped = states.unflatten(2, (groups, heads // groups)).transpose(1, 2)
    return grouped.reshape(sequences * groups, -1, width)


def _by_token(states: Tensor, sequences: int, length: int) -> Tensor:
    """Convert [S x G, L x R, D] to [S, L, G x R, D]."""
    return states.unflatten(1, (length, -1)).unflatten(0, (sequences, -1)).transpose(1, 2).flatten(2, 3)
