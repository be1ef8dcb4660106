"""Log-probs and entropies of hidden states through an output layer, in blocks of the vocabulary.

Shapes: N tokens, H hidden, V vocabulary, v words of one block, S splits.

No tensor of [N, V] exists, unless it is small. The forward pass keeps a running maximum, the sum of
exponentials and the sum of logits weighted by them, and saves three numbers per token, and the products of
as many words as ``_KEPT`` bytes hold. The backward pass computes the others again, and writes each block of
the weight's gradient once, in place: memory does not grow with N x V, and on a CPU a block stays in the
cache between operations.

The vocabulary may be spread over the ranks of a group (``OutputLayer.group``): three numbers per token are
exchanged in the forward pass, and the hidden states' gradient is summed in the backward pass.

On a GPU with matrix units, Triton kernels compute the blocks in 16 bits (``strop.algorithms.output_kernel``).
Liger's and Apple's fused losses (Cut Cross-Entropy) are for cross entropies only: neither computes entropies
with a gradient.
"""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from strop.algorithms.output_sums import LOWEST, VANISHES, Sums, Upstream

logger = logging.getLogger(__name__)

_BLOCK_ON_CPU, _BLOCK = 1 << 20, 1 << 25
"""Logits per block: few enough for a CPU's cache, enough to keep a GPU busy."""
_STEP = 64
"""The width of a block is a multiple of it: products of 442 columns run at two thirds of the speed of 448."""
_KEPT = 1 << 28
"""Bytes of products that are saved for the backward pass, those of the first words: 256 MiB."""
_CHUNK_ON_CPU = 1 << 24
"""Logits' gradients in 16 bits that a CPU multiplies at once, 32 MiB: few products, each of them rounded."""
_CHUNK, _WIDEST_CHUNK = 1 << 27, 1 << 14
"""Numbers in a buffer of the kernels, 256 MiB in 16 bits; words in it, few enough for a float32 sum."""
_LONG = 1 << 11
"""Words that are summed apart on a CPU: addmm_ adds one by one, with 10 times the error for 150,000 words."""


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
    options = (layer.scale, layer.soft_cap, temperature, product_dtype(hidden_NH), layer.group)
    ids_N = ids_N - layer.first_word  # words of other ranks are then in no block
    return _OutputLayerFunction.apply(hidden_NH, layer.weight_VH, layer.bias_V, ids_N, *options)


def product_dtype(hidden_NH: Tensor) -> torch.dtype:
    """Return the dtype of products of hidden states, as in a linear layer."""
    device = hidden_NH.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_NH.dtype


class _OutputLayerFunction(torch.autograd.Function):
    """See ``log_probs_and_entropy``."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, ids_N: Tensor, *options: Any
    ) -> tuple[Tensor, Tensor]:
        scale, soft_cap, temperature, dtype, group = options
        # an unused entropy then has the gradient None, and its part of the backward pass is skipped
        ctx.set_materialize_grads(False)
        ctx.options, ctx.hidden_dtype = options, hidden_NH.dtype
        with torch.autocast(hidden_NH.device.type, enabled=False):
            ctx.has_kernel = _has_kernel(hidden_NH.device, dtype)
            hidden_NH, ctx.kept = hidden_NH.to(dtype), []
            layer = OutputLayer(weight_VH, bias_V, scale, soft_cap)
            blocks = _Tiles if ctx.has_kernel else Blocks
            sums = blocks(hidden_NH, layer, temperature, ctx.kept).measure(
                ids_N, keep=any(ctx.needs_input_grad)
            )
            known = (sums if group is None else sums.over_ranks(group)).known()
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
            blocks = _Tiles if ctx.has_kernel else Blocks
            hidden, weight, bias = differentiate(
                blocks(hidden_NH, layer, temperature, ctx.kept),
                Upstream(ids_N, *known, log_prob_gradient_N, entropy_gradient_N),
                wanted=ctx.needs_input_grad,
            )
        ctx.kept = []  # a second backward pass computes the products again
        if hidden is not None and group is not None:
            # each rank has the part of its own words; weight and bias gradients are complete where they are
            dist.all_reduce(hidden, group=group)
        return None if hidden is None else hidden.to(ctx.hidden_dtype), weight, bias, *(None,) * 6


class Blocks:
    """Float32 logits of all N tokens, divided by the temperature, for one block of words at a time."""

    def __init__(self, hidden_NH: Tensor, layer: OutputLayer, temperature: float, kept: list[Tensor]) -> None:
        """Allocate buffers. ``hidden_NH`` has the dtype of the products.

        ``kept`` has the products [N, v] of the first blocks: ``measure`` appends, ``gradient`` reads them.
        """
        self.hidden_NH, self.layer, self.temperature = hidden_NH, layer, temperature
        n_tokens, vocabulary = len(hidden_NH), len(layer.weight_VH)
        size = _BLOCK_ON_CPU if hidden_NH.device.type == "cpu" else _BLOCK
        width = max(size // max(n_tokens, 1) // _STEP, 1) * _STEP
        self._width = width = max(min(width, vocabulary), 1)
        self.words = _slices(vocabulary, width)
        self.chunks = self.words
        """Words of one product in the backward pass: a block, in 16 bits on a CPU several."""
        if hidden_NH.device.type == "cpu" and hidden_NH.dtype != torch.float32:
            # a converted weight has H numbers a word, the gradient N: the larger one bounds the memory
            numbers = n_tokens if layer.weight_VH.dtype == hidden_NH.dtype else max(hidden_NH.shape)
            self.chunks = _slices(vocabulary, max(_CHUNK_ON_CPU // max(numbers, 1) // width, 1) * width)
        self._kept = kept
        self._changes = layer.bias_V is not None or layer.soft_cap is not None
        self._changes |= layer.scale != 1.0 or temperature != 1.0
        # flat, as the last block is narrower and a slice of a matrix would not be contiguous
        self._rooms = [torch.empty(n_tokens * width, device=hidden_NH.device) for _ in range(3)]

    def room(self, number: int, words: slice) -> Tensor:
        """Return a scratch buffer [N, v], valid for one block; 0 is reserved for logits."""
        return _matrix(self._rooms[number], len(self.hidden_NH), words.stop - words.start)

    def weight(self, words: slice) -> Tensor:
        """Return the block's rows [v, H], in the dtype of the products."""
        return self.layer.weight_VH[words].to(self.hidden_NH.dtype)

    def logits(self, words: slice, *, keep: bool = False) -> Tensor:
        """Compute the logits [N, v] of a block, from its product if that was kept; ``keep`` it."""
        layer, logits_Nv, block = self.layer, self.room(0, words), words.start // self._width
        if block < len(self._kept):
            product_Nv = self._kept[block]
        else:
            product_Nv = self.hidden_NH.new_empty(logits_Nv.shape) if keep else logits_Nv
            _product(self.hidden_NH, self.weight(words).t(), product_Nv)
        if keep:  # one tensor a block: malloc gives a large one back to the system after each use
            self._kept.append(product_Nv)
        if product_Nv is not logits_Nv:
            # callers read logits only; what they write goes to rooms 1 and 2, so a kept product stays whole
            if product_Nv.dtype == torch.float32 and not self._changes:
                return product_Nv
            logits_Nv.copy_(product_Nv)
        if layer.bias_V is not None:
            logits_Nv += layer.bias_V[words]
        if layer.scale != 1.0:
            logits_Nv *= layer.scale
        if layer.soft_cap is not None:
            logits_Nv.div_(layer.soft_cap).tanh_().mul_(layer.soft_cap)
        if self.temperature != 1.0:
            logits_Nv /= self.temperature
        return logits_Nv

    def room_for(self, rows: int) -> int:
        """Return the number of words whose products of ``rows`` tokens may be kept for a later pass."""
        return _KEPT // (max(rows, 1) * self.hidden_NH.element_size())

    def measure(self, ids_N: Tensor, *, keep: bool) -> Sums:
        """Make one pass over the vocabulary, summing exp(logit - highest) with the highest logit so far.

        ``keep``: products of up to ``_KEPT`` bytes for the backward pass.
        """
        n_kept = self.room_for(len(ids_N)) if keep else 0
        highest_N = torch.full(ids_N.shape, LOWEST, device=ids_N.device)
        picked_N, sum_N, weighted_N = (torch.zeros_like(highest_N) for _ in range(3))
        for words in self.words:
            logits_Nv = self.logits(words, keep=words.stop <= n_kept)
            inside_N, places_N1 = _places(ids_N, words)
            sums = Sums(picked_N, highest_N, sum_N, weighted_N)
            highest_N = torch.maximum(highest_N, logits_Nv.amax(dim=1))
            below_Nv = torch.sub(logits_Nv, highest_N[:, None], out=self.room(1, words))
            exp_Nv = torch.exp(below_Nv, out=self.room(2, words))
            if self.layer.bias_V is not None:  # -inf in a bias forbids words
                below_Nv.clamp_(min=VANISHES)
            # a new highest logit rescales the sums so far
            picked_N, sum_N, weighted_N = sums.lowered(highest_N)
            picked_N = torch.where(inside_N, logits_Nv.gather(1, places_N1)[:, 0], picked_N)
            weighted_N, sum_N = weighted_N + below_Nv.mul_(exp_Nv).sum(dim=1), sum_N + exp_Nv.sum(dim=1)
        return Sums(picked_N, highest_N, sum_N, weighted_N)

    def gradient(self, words: slice, upstream: Upstream, *, with_sums: bool) -> tuple[Tensor, Tensor | None]:
        """Return the gradient of hidden weight^T + bias [N, v] of a chunk, and its sums [v].

        It is float32 and valid for one block, or of several blocks in the dtype of the products.
        """
        blocks = [block for block in self.words if words.start <= block.start < words.stop]
        if len(blocks) == 1:
            gradient_Nv = self._block_gradient(words, upstream)
            return gradient_Nv, gradient_Nv.sum(dim=0) if with_sums else None
        chunk_Nv = self.hidden_NH.new_empty(len(self.hidden_NH), words.stop - words.start)
        sums = []
        for block, part_Nv in zip(
            blocks, chunk_Nv.split(blocks[0].stop - blocks[0].start, dim=1), strict=True
        ):
            gradient_Nv = self._block_gradient(block, upstream)
            part_Nv.copy_(gradient_Nv)
            if with_sums:
                sums.append(gradient_Nv.sum(dim=0))
        return chunk_Nv, torch.cat(sums) if with_sums else None

    def _block_gradient(self, words: slice, upstream: Upstream) -> Tensor:
        logits_Nv = self.logits(words)
        return self._through_layer(self._logit_gradient(words, logits_Nv, upstream), logits_Nv)

    def _logit_gradient(self, words: slice, logits_Nv: Tensor, upstream: Upstream) -> Tensor:
        """Return g (1[id] - p) - e p (log p + H) [N, v]; g, e are the gradients of log-prob and entropy H."""
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


class _Tiles:
    """The same as ``Blocks``, by Triton kernels that write no logits: ``output_kernel``."""

    def __init__(self, hidden_NH: Tensor, layer: OutputLayer, temperature: float, kept: list[Tensor]) -> None:
        """Choose the chunks of words of the backward pass. No products are kept."""
        from strop.algorithms import output_kernel

        self._kernel = output_kernel
        self.hidden_NH, self.layer = hidden_NH.contiguous(), layer
        self.chunks = self._chunks(len(hidden_NH))
        self._converted: tuple[slice, Tensor] | None = None
        self._room = hidden_NH.new_empty(0)
        factors = output_kernel.Factors.of(layer.scale, layer.soft_cap, temperature)
        self._options: dict[str, Any] = {"factors": factors, "vanishes": VANISHES}

    def _chunks(self, numbers_per_word: int) -> list[slice]:
        """Divide the words so that a buffer of a chunk has at most ``_CHUNK`` numbers; whole splits."""
        width = min(_CHUNK // max(numbers_per_word, 1), _WIDEST_CHUNK)
        width = max(width // self._kernel.WORDS, 1) * self._kernel.WORDS
        vocabulary = len(self.layer.weight_VH)
        return _slices(vocabulary, width) or [slice(0, 0)]  # a rank may have no words

    def weight(self, words: slice) -> Tensor:
        """See ``Blocks.weight``; keeps the last one."""
        if self._converted is None or self._converted[0] != words:
            self._converted = words, self.layer.weight_VH[words].to(self.hidden_NH.dtype)
        return self._converted[1]

    def _bias(self, words: slice) -> Tensor | None:
        return self.layer.bias_V[words].contiguous() if self.layer.bias_V is not None else None

    def measure(self, ids_N: Tensor, *, keep: bool) -> Sums:
        """See ``Blocks.measure``; in chunks only where the weight has to be converted."""
        vocabulary, hidden = self.layer.weight_VH.shape
        is_converted = self.layer.weight_VH.dtype != self.hidden_NH.dtype
        parts = [
            self._kernel.partial_sums(
                *(self.hidden_NH, self.weight(words), self._bias(words), ids_N - words.start),
                lowest=LOWEST,
                **self._options,
            )
            for words in (self._chunks(hidden) if is_converted else [slice(0, vocabulary)])
        ]
        sums = Sums(*torch.cat(parts, dim=1))  # [S, N] each
        highest_N = sums.highest_N.amax(dim=0)
        picked_N, sum_N, weighted_N = (part_SN.sum(dim=0) for part_SN in sums.lowered(highest_N))
        return Sums(picked_N, highest_N, sum_N, weighted_N)

    def gradient(self, words: slice, upstream: Upstream, *, with_sums: bool) -> tuple[Tensor, Tensor | None]:
        """See ``Blocks.gradient``; in the dtype of the products."""
        n_tokens, width = len(self.hidden_NH), words.stop - words.start
        if len(self._room) < n_tokens * width:
            self._room = self.hidden_NH.new_empty(n_tokens * width)
        gradient_Nv = _matrix(self._room, n_tokens, width)
        ids_N, highest_N, log_sum_N, entropy_N, g_N, e_N = upstream
        sums_v = self._kernel.logit_gradient(
            *(gradient_Nv, self.hidden_NH, self.weight(words), self._bias(words), ids_N - words.start),
            *((highest_N, log_sum_N, entropy_N), g_N, e_N),
            with_column_sums=with_sums,
            **self._options,
        )
        return gradient_Nv, sums_v


@functools.cache
def _has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if the kernels are used: on a GPU in 16 bits, and wherever Triton's interpreter is on.

    Without matrix units, in float32 and on older GPUs, torch's products are faster than Triton's.
    Compares the kernels with blocks first: Triton needs a C compiler, and not every GPU compiles everything.
    """
    if device.type == "cuda":
        is_possible = dtype in (torch.bfloat16, torch.float16)
        is_possible = is_possible and torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        is_possible = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if not is_possible or find_spec("triton") is None:
        return False
    try:
        difference = _difference_of_kernel(device, dtype)
    except Exception as error:  # noqa: BLE001 - whatever a compiler raises, there is another way
        reason = f"{type(error).__name__}: {error}"
    else:
        if difference < 0.05:
            return True
        reason = f"its results differ by {difference:.2g}"
    logger.warning(
        "Using torch's slower operations for the output layer: its Triton kernel fails on %s in %s: %s",
        *(device, dtype, reason),
    )
    return False


def _difference_of_kernel(device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest difference in log-probs, entropies and gradients of a small case; may be NaN.

    Sizes are multiples of those that kernels are specialized by, so most models use the same compiled ones.
    """
    generator = torch.Generator().manual_seed(0)
    hidden_NH, weight_VH = (torch.randn(size, 64, generator=generator) for size in (24, 112))
    hidden_NH, weight_VH = hidden_NH.to(device, dtype), (weight_VH / 8).to(device, dtype)
    ids_N = torch.arange(24, device=device)
    found: list[list[Tensor]] = []
    for kind in (Blocks, _Tiles):
        blocks = kind(hidden_NH, OutputLayer(weight_VH), 1.0, [])
        known = blocks.measure(ids_N, keep=False).known()
        ones_N = torch.ones_like(known.log_prob_N)
        upstream = Upstream(ids_N, *known[1:], ones_N, ones_N)
        gradients = differentiate(blocks, upstream, wanted=(True, True, False))
        found.append([known.log_prob_N, known.entropy_N, *(part for part in gradients if part is not None)])
    differences = [(ours - theirs).abs().max() for ours, theirs in zip(*found, strict=True)]
    return float(torch.stack(differences).max())  # Python's max would drop a NaN


def _slices(vocabulary: int, width: int) -> list[slice]:
    return [slice(start, min(start + width, vocabulary)) for start in range(0, vocabulary, width)]


def _matrix(memory: Tensor, n_tokens: int, width: int) -> Tensor:
    return memory[: n_tokens * width].view(n_tokens, width)


def differentiate(
    blocks: Blocks | _Tiles, upstream: Any, *, wanted: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of hidden states (float32), weight and bias; None where not ``wanted``.

    ``upstream`` is what the ``gradient`` of these ``blocks`` takes.
    """
    hidden_NH, layer = blocks.hidden_NH, blocks.layer
    # float32: a sum over 594 blocks in bfloat16 is 20 times as far off as one rounding, and biased
    # (benchmarks/results/accumulation_2026-11-22.md)
    hidden_gradient_NH = torch.zeros_like(hidden_NH, dtype=torch.float32) if wanted[0] else None
    # empty: each word's row is written by one product over all tokens, and rounded once
    weight_gradient_VH = torch.empty_like(layer.weight_VH) if wanted[1] else None
    bias_gradient_V = torch.empty_like(layer.bias_V) if wanted[2] and layer.bias_V is not None else None
    for words in blocks.chunks:
        gradient_Nv, sums_v = blocks.gradient(words, upstream, with_sums=bias_gradient_V is not None)
        if bias_gradient_V is not None and sums_v is not None:
            bias_gradient_V[words] = sums_v
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
    """Add a @ b to ``total``, which is float32; b has the dtype of the products, a too or it is float32.

    A 16-bit product is rounded where torch has no other: a sum over few chunks of the vocabulary is then as
    near as the product of a linear layer, which is rounded once (``benchmarks/accumulation.py``).
    """
    if b.dtype != torch.float32 and _has_wide_products(b.device.type):
        total += torch.mm(a.to(b.dtype), b, out_dtype=torch.float32)
    elif b.dtype != torch.float32:
        total += a.to(b.dtype) @ b
    elif len(b) < _LONG:
        total.addmm_(a, b)
    else:
        total += a @ b


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
        # torch.mm(out=) requires one dtype
        out.copy_(a @ b)
