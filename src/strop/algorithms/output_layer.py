"""Log-probs and entropies of hidden states through an output layer, in blocks of the vocabulary.

Shapes: N tokens, H hidden, V vocabulary, v words of one block.

No tensor of [N, V] exists, unless it is small. The forward pass keeps a running maximum, the sum of
exponentials and the sum of logits weighted by them, and saves three numbers per token. The backward pass
recomputes the logits, and writes each block of the weight's gradient once, in place: memory does not grow
with N x V, and on a CPU a block stays in the cache between operations.

The vocabulary may be spread over the ranks of a group (``OutputLayer.group``): three numbers per token are
exchanged in the forward pass, and the hidden states' gradient is summed in the backward pass.

Liger's and Apple's fused losses (Cut Cross-Entropy) do the same for cross entropies only. Neither computes
entropies with a gradient, so GPUs use this module too.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

_BLOCK_ON_CPU, _BLOCK = 1 << 20, 1 << 25
"""Logits per block: few enough for a CPU's cache, enough to keep a GPU busy."""
_NARROWEST = 64
_KEPT = 1 << 24
"""Largest number of logits saved for the backward pass: 64 MiB are cheaper than recomputing them."""
_LOWEST = torch.finfo(torch.float32).min
VANISHES = -1000.0
"""Stands for the -inf of a forbidden word: its exp is 0 too, and 0 times it is 0 instead of NaN."""


@dataclass(frozen=True)
class OutputLayer:
    """A language-model head: cap(scale x (hidden weight^T + bias)), cap(x) = c tanh(x / c)."""

    weight_VH: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    soft_cap: float | None = None
    first_word: int = 0
    """Id of the first row of ``weight_VH``."""
    group: dist.ProcessGroup | None = None
    """Ranks that hold the other rows, and call with the same tokens; None: all rows are here."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute logits [..., V] of hidden states [..., H]."""
        logits = functional.linear(hidden, self.weight_VH, self.bias_V)
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.soft_cap is None else torch.tanh(logits / self.soft_cap) * self.soft_cap


def log_probs_and_entropy(
    hidden_NH: Tensor, layer: OutputLayer, ids_N: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return float32 log p(id) [N] and -sum_V p log p [N], with p = softmax(layer(hidden) / temperature).

    Under autocast the products use its dtype, as in a linear layer; everything else is float32. Both have
    gradients to hidden states, weight and bias; skips the entropy's part if its gradient is not needed.
    """
    device = hidden_NH.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_NH.dtype
    options = (layer.scale, layer.soft_cap, temperature, dtype, layer.group)
    ids_N = ids_N - layer.first_word  # words of other ranks are then in no block
    return _OutputLayerFunction.apply(hidden_NH, layer.weight_VH, layer.bias_V, ids_N, *options)


class _OutputLayerFunction(torch.autograd.Function):
    """See ``log_probs_and_entropy``."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, ids_N: Tensor, *options: Any
    ) -> tuple[Tensor, Tensor]:
        scale, soft_cap, temperature, dtype, group = options
        ctx.set_materialize_grads(False)
        ctx.options, ctx.hidden_dtype = options, hidden_NH.dtype
        n_logits = len(ids_N) * len(weight_VH)
        keeps = any(ctx.needs_input_grad) and n_logits <= _KEPT
        ctx.kept = torch.empty(n_logits, device=hidden_NH.device) if keeps else None
        with torch.autocast(hidden_NH.device.type, enabled=False):
            hidden_NH = hidden_NH.to(dtype)
            layer = OutputLayer(weight_VH, bias_V, scale, soft_cap)
            sums = _Blocks(hidden_NH, layer, temperature, ctx.kept).measure(ids_N)
            known = _known(sums if group is None else _over_ranks(sums, group))
        ctx.save_for_backward(
            hidden_NH, weight_VH, bias_V, ids_N, known.highest_N, known.log_sum_N, known.entropy_N
        )
        return known.log_prob_N, known.entropy_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, log_prob_gradient_N: Tensor | None, entropy_gradient_N: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, ids_N, *known = ctx.saved_tensors
        scale, soft_cap, temperature, _, group = ctx.options
        if log_prob_gradient_N is None:
            log_prob_gradient_N = torch.zeros(ids_N.shape, device=ids_N.device)
        with torch.autocast(hidden_NH.device.type, enabled=False):
            layer = OutputLayer(weight_VH, bias_V, scale, soft_cap)
            hidden, weight, bias = _differentiate(
                _Blocks(hidden_NH, layer, temperature, ctx.kept),
                _Upstream(ids_N, *known, log_prob_gradient_N, entropy_gradient_N),
                wanted=ctx.needs_input_grad,
            )
        ctx.kept = None
        if hidden is not None and group is not None:
            dist.all_reduce(hidden, group=group)
        return None if hidden is None else hidden.to(ctx.hidden_dtype), weight, bias, *(None,) * 6


class _Known(NamedTuple):
    """Per token, float32."""

    log_prob_N: Tensor
    highest_N: Tensor
    """The highest logit; separate from log_sum_N, whose digits it would absorb."""
    log_sum_N: Tensor
    """log sum_V exp(logit - highest)"""
    entropy_N: Tensor


class _Sums(NamedTuple):
    """Per token, float32, of the words of one rank or of all."""

    picked_N: Tensor
    """The id's logit; 0 if it is another rank's word."""
    highest_N: Tensor
    sum_N: Tensor
    """sum_V exp(logit - highest)"""
    weighted_N: Tensor
    """sum_V (logit - highest) exp(logit - highest)"""


class _Upstream(NamedTuple):
    """Inputs of the logits' gradient, per token."""

    ids_N: Tensor
    highest_N: Tensor
    log_sum_N: Tensor
    entropy_N: Tensor
    log_prob_gradient_N: Tensor
    entropy_gradient_N: Tensor | None


class _Blocks:
    """Float32 logits of all N tokens, divided by the temperature, for one block of words at a time."""

    def __init__(
        self, hidden_NH: Tensor, layer: OutputLayer, temperature: float, kept: Tensor | None
    ) -> None:
        """Allocate buffers. ``hidden_NH`` has the dtype of the products; ``kept`` holds all logits [N x V].

        Without ``kept``, computing a block's logits overwrites the previous block's. ``gradient`` expects
        logits in ``kept``, as a previous ``measure`` left them.
        """
        self.hidden_NH, self.layer, self.temperature = hidden_NH, layer, temperature
        n_tokens, vocabulary = len(hidden_NH), len(layer.weight_VH)
        size = _BLOCK_ON_CPU if hidden_NH.device.type == "cpu" else _BLOCK
        width = max(min(max(size // max(n_tokens, 1), _NARROWEST), vocabulary), 1)
        self.words = [slice(start, min(start + width, vocabulary)) for start in range(0, vocabulary, width)]
        self._kept = kept
        numbers = (0, 1, 2) if kept is None else (1, 2)
        self._rooms = {n: torch.empty(n_tokens * width, device=hidden_NH.device) for n in numbers}

    def logits_room(self, words: slice) -> Tensor:
        """Return the buffer for the logits [N, v] of a block."""
        if self._kept is None:
            return self.room(0, words)
        return _matrix(self._kept, words.start, words, len(self.hidden_NH))

    def room(self, number: int, words: slice) -> Tensor:
        """Return a scratch buffer [N, v], valid for one block; 0 is reserved for logits."""
        return _matrix(self._rooms[number], 0, words, len(self.hidden_NH))

    def weight(self, words: slice) -> Tensor:
        """Return the block's rows [v, H], in the dtype of the products."""
        return self.layer.weight_VH[words].to(self.hidden_NH.dtype)

    def logits(self, words: slice) -> Tensor:
        """Compute the logits [N, v] of a block."""
        layer, logits_Nv, weight_Hv = self.layer, self.logits_room(words), self.weight(words).t()
        if self.hidden_NH.dtype == torch.float32:
            torch.mm(self.hidden_NH, weight_Hv, out=logits_Nv)
        else:
            logits_Nv.copy_(self.hidden_NH @ weight_Hv)
        if layer.bias_V is not None:
            logits_Nv += layer.bias_V[words]
        if layer.scale != 1.0:
            logits_Nv *= layer.scale
        if layer.soft_cap is not None:
            logits_Nv.div_(layer.soft_cap).tanh_().mul_(layer.soft_cap)
        if self.temperature != 1.0:
            logits_Nv /= self.temperature
        return logits_Nv

    def measure(self, ids_N: Tensor) -> _Sums:
        """Make one pass over the vocabulary, summing exp(logit - highest) with the highest logit so far."""
        highest_N = torch.full(ids_N.shape, _LOWEST, device=ids_N.device)
        picked_N, sum_N, weighted_N = (torch.zeros_like(highest_N) for _ in range(3))
        for words in self.words:
            logits_Nv = self.logits(words)
            inside_N, places_N1 = _places(ids_N, words)
            picked_N = torch.where(inside_N, logits_Nv.gather(1, places_N1)[:, 0], picked_N)
            before_N, highest_N = highest_N, torch.maximum(highest_N, logits_Nv.amax(dim=1))
            below_Nv = torch.sub(logits_Nv, highest_N[:, None], out=self.room(1, words))
            exp_Nv = torch.exp(below_Nv, out=self.room(2, words))
            if self.layer.bias_V is not None:  # -inf in a bias forbids words
                below_Nv.clamp_(min=VANISHES)
            # a new highest logit rescales the sums so far
            down_N = (before_N - highest_N).clamp_(min=VANISHES)
            weighted_N = (weighted_N + down_N * sum_N) * down_N.exp() + below_Nv.mul_(exp_Nv).sum(dim=1)
            sum_N = sum_N * down_N.exp() + exp_Nv.sum(dim=1)
        return _Sums(picked_N, highest_N, sum_N, weighted_N)

    def gradient(self, words: slice, upstream: _Upstream) -> Tensor:
        """Return the float32 gradient of hidden weight^T + bias [N, v], valid for one block."""
        logits_Nv = self.logits(words) if self._kept is None else self.logits_room(words)
        return self._through_layer(self._logit_gradient(words, logits_Nv, upstream), logits_Nv)

    def _logit_gradient(self, words: slice, logits_Nv: Tensor, upstream: _Upstream) -> Tensor:
        """Return g (1[id] - p) - e p (log p + H) [N, v], with g, e the gradients of log-prob and entropy H."""
        ids_N, highest_N, log_sum_N, entropy_N, g_N, e_N = upstream
        log_p_Nv = torch.sub(logits_Nv, highest_N[:, None], out=self.room(1, words))
        log_p_Nv -= log_sum_N[:, None]
        p_Nv = torch.exp(log_p_Nv, out=self.room(2, words))
        if e_N is None:
            gradient_Nv = p_Nv.mul_(-g_N[:, None])
        else:
            if self.layer.bias_V is not None:
                log_p_Nv.clamp_(min=VANISHES)
            constant_N = g_N + e_N * entropy_N
            gradient_Nv = log_p_Nv.mul_(-e_N[:, None]).sub_(constant_N[:, None]).mul_(p_Nv)
        inside_N, places_N1 = _places(ids_N, words)
        return gradient_Nv.scatter_add_(1, places_N1, torch.where(inside_N, g_N, 0.0)[:, None])

    def _through_layer(self, gradient_Nv: Tensor, logits_Nv: Tensor) -> Tensor:
        """Backpropagate from these logits to hidden weight^T + bias, in place."""
        layer = self.layer
        if layer.soft_cap is not None:  # d c tanh(x/c) = 1 - tanh(x/c)^2
            capped_Nv = logits_Nv * (self.temperature / layer.soft_cap)
            gradient_Nv *= 1 - capped_Nv.square_()
        if layer.scale != self.temperature:
            gradient_Nv *= layer.scale / self.temperature
        return gradient_Nv


def _matrix(memory: Tensor, first_word: int, words: slice, n_tokens: int) -> Tensor:
    width = words.stop - words.start
    return memory[n_tokens * first_word : n_tokens * (first_word + width)].view(n_tokens, width)


def _over_ranks(sums: _Sums, group: dist.ProcessGroup) -> _Sums:
    """Combine the sums of every rank's words. Collective."""
    picked_N, own_highest_N, sum_N, weighted_N = sums
    highest_N = own_highest_N.clone()
    dist.all_reduce(highest_N, dist.ReduceOp.MAX, group=group)
    down_N = (own_highest_N - highest_N).clamp_(min=VANISHES)
    sums_3N = torch.stack([picked_N, sum_N * down_N.exp(), (weighted_N + down_N * sum_N) * down_N.exp()])
    dist.all_reduce(sums_3N, group=group)
    return _Sums(sums_3N[0], highest_N, sums_3N[1], sums_3N[2])


def _known(sums: _Sums) -> _Known:
    picked_N, highest_N, sum_N, weighted_N = sums
    log_sum_N = sum_N.log()
    log_prob_N = picked_N - highest_N - log_sum_N
    return _Known(log_prob_N, highest_N, log_sum_N, log_sum_N - weighted_N / sum_N)


def _differentiate(
    blocks: _Blocks, upstream: _Upstream, *, wanted: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of hidden states (float32), weight and bias; None where not ``wanted``."""
    hidden_NH, layer = blocks.hidden_NH, blocks.layer
    hidden_gradient_NH = torch.zeros_like(hidden_NH, dtype=torch.float32) if wanted[0] else None
    weight_gradient_VH = torch.empty_like(layer.weight_VH) if wanted[1] else None
    bias_gradient_V = torch.empty_like(layer.bias_V) if wanted[2] and layer.bias_V is not None else None
    for words in blocks.words:
        gradient_Nv = blocks.gradient(words, upstream)
        if bias_gradient_V is not None:
            bias_gradient_V[words] = gradient_Nv.sum(dim=0)
        if hidden_gradient_NH is not None:
            _add_product(gradient_Nv, blocks.weight(words), hidden_gradient_NH)
        if weight_gradient_VH is not None:
            _product(gradient_Nv.to(hidden_NH.dtype).t(), hidden_NH, weight_gradient_VH[words])
    return hidden_gradient_NH, weight_gradient_VH, bias_gradient_V


def _places(ids_N: Tensor, words: slice) -> tuple[Tensor, Tensor]:
    """Return whether each id is in the block [N], and its column there [N, 1]; column 0 if it is not."""
    inside_N = (ids_N >= words.start) & (ids_N < words.stop)
    return inside_N, torch.where(inside_N, ids_N - words.start, 0)[:, None]


def _add_product(a: Tensor, b: Tensor, total: Tensor) -> None:
    """Add a @ b to ``total``; a and total are float32, b has the dtype of the products.

    Never rounds the product itself: the sum over hundreds of blocks would have hundreds of rounding errors of
    bfloat16 where a linear layer has one.
    """
    if b.dtype != torch.float32 and _has_wide_products(b.device.type):
        total += torch.mm(a.to(b.dtype), b, out_dtype=torch.float32)
    else:
        total.addmm_(a, b.float())


@functools.cache
def _has_wide_products(device: str) -> bool:
    """Return True if torch multiplies 16-bit matrices into float32 on such devices; CPUs do not."""
    one = torch.ones(1, 1, dtype=torch.bfloat16, device=device)
    try:
        return torch.mm(one, one, out_dtype=torch.float32).dtype == torch.float32
    except (NotImplementedError, RuntimeError):
        return False


def _product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write a @ b, rounded once to the dtype of the operands, as in a linear layer."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    else:
        out.copy_(a @ b)
