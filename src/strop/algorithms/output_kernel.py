"""Triton kernels of the output layer: logits of a tile in registers, their sums and their gradient.

Shapes: N tokens in B blocks, H hidden, V words, v of one chunk, S splits of the vocabulary; ``WORDS`` words
a split.

A product costs 4.4 ps a logit on an H100 (2 H operations at 700 TFLOP/s, H = 1536), and writing the gradient
in 16 bits and reading it twice 1.8 ps (3.35 TB/s), so the backward pass writes it, in bounded chunks, for two
calls of torch.mm: that is faster than a fused kernel for each of the two products, which would compute the
logits once more. A kernel of both at once would need atomic additions, because the hidden states' sums (H
numbers a token) do not fit into registers, and their order and result would vary from run to run.

A loss that computes gradients of its chunks in the forward pass (Liger's) has 3 products in place of 4. It is
better where a batch has one update, no other use of log-probs, and no gradient of the entropy: the gradient
with respect to a log-prob has to be known before the log-probs of other chunks are.

Tiles and splits do not depend on N, so neither do a token's sums over a split.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 2048
"""Words that one program of the forward pass sums: many programs even for one token block."""


class Factors(NamedTuple):
    """Logits divided by the temperature: inner x, with a soft cap outer tanh(inner x), of the products x."""

    inner: float
    outer: float = 1.0
    is_capped: bool = False

    @classmethod
    def of(cls, scale: float, soft_cap: float | None, temperature: float) -> Factors:
        """Return the factors of cap(scale x) / temperature, cap(x) = soft_cap tanh(x / soft_cap)."""
        if soft_cap is None:
            return cls(scale / temperature)
        return cls(scale / soft_cap, soft_cap / temperature, is_capped=True)


class _Tile(NamedTuple):
    """Sizes of a program's tile of logits, of a step of their product, and launch options."""

    tokens: int
    words: int
    hidden: int
    warps: int
    stages: int


_INTERPRETED = _Tile(16, 32, 16, 4, 1)
"""Small, so that small cases have many tiles."""


def partial_sums(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    ids_N: Tensor,
    *,
    factors: Factors,
    lowest: float,
    vanishes: float,
) -> Tensor:
    """Return float32 [4, S, N]: of each split the id's logit or 0, highest logit, sum and weighted sum.

    ``hidden_NH``, contiguous, and ``weight_VH`` have one dtype. ``lowest`` is the highest logit of no words,
    ``vanishes`` the lower bound of a logit below the highest.
    """
    (n_tokens, hidden), n_words = hidden_NH.shape, len(weight_VH)
    n_splits = max(triton.cdiv(n_words, WORDS), 1)  # a rank may have no words
    sums_4SN = torch.empty(4, n_splits, n_tokens, device=hidden_NH.device)
    tile = _tile(hidden_NH, bias_V is None and not factors.is_capped)
    if sums_4SN.numel():
        with torch.cuda.device_of(hidden_NH):
            _sum_words[(triton.cdiv(n_tokens, tile.tokens), n_splits)](
                *(hidden_NH, weight_VH.contiguous(), bias_V, ids_N, sums_4SN),
                *(n_tokens, n_words, n_splits, hidden, factors.inner, factors.outer, lowest, vanishes),
                WORDS=WORDS,
                **_constants(hidden, bias_V is not None, factors.is_capped, tile, not hidden_NH.is_cuda),
            )
    return sums_4SN


def logit_gradient(
    out_Nv: Tensor,
    hidden_NH: Tensor,
    weight_vH: Tensor,
    bias_v: Tensor | None,
    ids_N: Tensor,
    known: tuple[Tensor, Tensor, Tensor],
    log_prob_gradient_N: Tensor,
    entropy_gradient_N: Tensor | None,
    *,
    factors: Factors,
    vanishes: float,
    with_column_sums: bool,
) -> Tensor | None:
    """Write the gradient of hidden weight^T + bias to ``out_Nv``; return its sums over the tokens [v].

    ``known`` are the highest logit, the log of the sum and the entropy per token, over all words.
    ``out_Nv`` is contiguous, of the dtype of ``hidden_NH`` and ``weight_vH``. The float32 sums are those of
    the numbers before they are rounded to it; None unless ``with_column_sums``.
    """
    (n_tokens, n_words), hidden = out_Nv.shape, hidden_NH.shape[1]
    tile = _tile(hidden_NH, bias_v is None and not factors.is_capped)
    blocks = triton.cdiv(n_tokens, tile.tokens)
    columns_Bv = torch.empty(blocks, n_words, device=out_Nv.device) if with_column_sums else None
    if out_Nv.numel():
        with torch.cuda.device_of(hidden_NH):
            _differentiate_words[(blocks, triton.cdiv(n_words, tile.words))](
                *(hidden_NH, weight_vH.contiguous(), bias_v, ids_N, *known, log_prob_gradient_N.contiguous()),
                entropy_gradient_N.contiguous() if entropy_gradient_N is not None else None,
                *(out_Nv, columns_Bv, n_tokens, n_words, hidden, factors.inner, factors.outer, vanishes),
                HAS_ENTROPY=entropy_gradient_N is not None,
                HAS_SUMS=with_column_sums,
                **_constants(hidden, bias_v is not None, factors.is_capped, tile, not hidden_NH.is_cuda),
            )
    return columns_Bv.sum(0) if columns_Bv is not None else None


def _tile(hidden_NH: Tensor, plain: bool) -> _Tile:
    if not hidden_NH.is_cuda:
        return _INTERPRETED
    device = torch.cuda.get_device_properties(hidden_NH.device)
    shared_memory = getattr(device, "shared_memory_per_block_optin", device.shared_memory_per_block)
    return tile_of(hidden_NH.dtype, shared_memory, plain=plain)


def tile_of(dtype: torch.dtype, shared_memory: int, *, plain: bool) -> _Tile:
    """Choose by dtype and bytes of shared memory, never by timing, whose choices would change results.

    ``plain``: without bias and soft cap, which need registers; ptxas would spill 0.8 to 1.1 KB of a thread.
    """
    if dtype == torch.float32:
        return _Tile(64, 64, 32, 4, 3)
    # three steps of the operands: 144 or 96 KiB (A100, H100, B200), or 48 KiB
    if shared_memory >= 160 << 10:
        return _Tile(128, 256 if plain else 128, 64, 8, 3)
    return _Tile(128, 128, 32, 8, 3)


def _constants(
    hidden: int, has_bias: bool, is_capped: bool, tile: _Tile, interpreted: bool
) -> dict[str, Any]:
    return {
        "IS_WHOLE": hidden % tile.hidden == 0,
        "HAS_BIAS": has_bias,
        "IS_CAPPED": is_capped,
        "INTERPRETED": interpreted,
        "TOKENS": tile.tokens,
        "TILE": tile.words,
        "STEP": tile.hidden,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


@triton.jit
def _tanh(x):
    """Return tanh(x) to 1e-7 relative; the polynomial is that of Cephes' tanhf."""
    z = x * x
    small = -5.70498872745e-3 * z + 2.06390887954e-2
    small = small * z - 5.37397155531e-2
    small = small * z + 1.33314422036e-1
    small = (small * z - 3.33332819422e-1) * z * x + x
    return tl.where(tl.abs(x) < 0.625, small, 1 - 2 / (tl.exp(2 * x) + 1))


@triton.jit
def _rounded(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Round float32 to the nearest number of ``dtype``, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:  # Triton's interpreter truncates
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def _logits(
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    tokens,
    start,
    n_tokens,
    n_words,
    hidden_size,
    inner,
    outer,
    IS_WHOLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_CAPPED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Compute float32 logits [TOKENS, TILE] from word ``start`` on (``Factors``); any past the last word."""
    # rows past the last are the first ones again, whose results are not stored: reads need no mask
    token_rows = (tokens % n_tokens).to(tl.int64)
    word_rows = ((start + tl.arange(0, TILE)) % n_words).to(tl.int64)
    places = tl.arange(0, STEP)
    hidden_ptrs = hidden_ptr + token_rows[:, None] * hidden_size + places[None, :]
    weight_ptrs = weight_ptr + word_rows[None, :] * hidden_size + places[:, None]
    products = tl.zeros([TOKENS, TILE], dtype=tl.float32)
    for done in range(0, hidden_size, STEP):
        if IS_WHOLE:
            hidden = tl.load(hidden_ptrs)
            weight = tl.load(weight_ptrs)
        else:
            hidden = tl.load(hidden_ptrs, mask=places[None, :] < hidden_size - done, other=0.0)
            weight = tl.load(weight_ptrs, mask=places[:, None] < hidden_size - done, other=0.0)
        if INTERPRETED:  # Triton's interpreter multiplies the bits of bfloat16 as integers
            hidden = hidden.to(tl.float32)
            weight = weight.to(tl.float32)
        # ieee: float32 operands would be multiplied in TF32, with 10 bits, by default
        products = tl.dot(hidden, weight, products, input_precision="ieee")
        hidden_ptrs += STEP
        weight_ptrs += STEP
    # rounded as torch's linear layer and vLLM round them: finer logits would part trainer and sampler
    logits = _rounded(products, hidden_ptr.dtype.element_ty, INTERPRETED).to(tl.float32)
    if HAS_BIAS:
        logits += tl.load(bias_ptr + word_rows).to(tl.float32)[None, :]
    logits *= inner
    if IS_CAPPED:
        logits = _tanh(logits) * outer
    return logits


# Triton compiles again for an argument that is 1 or a multiple of 16; token counts change every batch
@triton.jit(do_not_specialize=["n_tokens", "n_words", "n_splits"])
def _sum_words(
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    ids_ptr,
    sums_ptr,
    n_tokens,
    n_words,
    n_splits,
    hidden_size,
    inner,
    outer,
    lowest,
    vanishes,
    WORDS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_CAPPED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Sum over the tiles of one split, as ``strop.algorithms.output_layer`` does over blocks."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(1)
    columns = tl.arange(0, TILE)
    ids = tl.load(ids_ptr + tokens % n_tokens).to(tl.int32)
    ids = tl.where(ids < n_words, ids, -1)  # another rank's word, which may be the number of an empty column
    highest = tl.zeros([TOKENS], dtype=tl.float32) + lowest
    picked = tl.zeros([TOKENS], dtype=tl.float32)
    total = tl.zeros([TOKENS], dtype=tl.float32)
    weighted = tl.zeros([TOKENS], dtype=tl.float32)
    for start in range(split * WORDS, tl.minimum(split * WORDS + WORDS, n_words), TILE):
        logits = _logits(
            hidden_ptr,
            weight_ptr,
            bias_ptr,
            tokens,
            start,
            n_tokens,
            n_words,
            hidden_size,
            inner,
            outer,
            IS_WHOLE,
            HAS_BIAS,
            IS_CAPPED,
            INTERPRETED,
            TOKENS,
            TILE,
            STEP,
        )
        # columns are compared with what is relative to the tile, for which no register is needed per column
        picked += tl.sum(tl.where(columns[None, :] == (ids - start)[:, None], logits, 0.0), 1)
        logits = tl.where((columns < n_words - start)[None, :], logits, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(logits, 1))
        below = logits - new_highest[:, None]
        exp = tl.exp(below)
        down = tl.maximum(highest - new_highest, vanishes)
        shrink = tl.exp(down)
        weighted = (weighted + down * total) * shrink + tl.sum(tl.maximum(below, vanishes) * exp, 1)
        total = total * shrink + tl.sum(exp, 1)
        highest = new_highest
    plane = n_splits.to(tl.int64) * n_tokens
    sums_ptrs = sums_ptr + split.to(tl.int64) * n_tokens + tokens
    tl.store(sums_ptrs, picked, mask=tokens < n_tokens)
    tl.store(sums_ptrs + plane, highest, mask=tokens < n_tokens)
    tl.store(sums_ptrs + 2 * plane, total, mask=tokens < n_tokens)
    tl.store(sums_ptrs + 3 * plane, weighted, mask=tokens < n_tokens)


@triton.jit(do_not_specialize=["n_tokens"])
def _differentiate_words(
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    ids_ptr,
    highest_ptr,
    log_sum_ptr,
    entropy_ptr,
    log_prob_gradient_ptr,
    entropy_gradient_ptr,
    out_ptr,
    column_sums_ptr,
    n_tokens,
    n_words,
    hidden_size,
    inner,
    outer,
    vanishes,
    HAS_ENTROPY: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_CAPPED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Write a tile of the gradient of hidden weight^T + bias, and its sums over the tile's tokens."""
    block = tl.program_id(0)
    tokens = block * TOKENS + tl.arange(0, TOKENS)
    start = tl.program_id(1) * TILE
    logits = _logits(
        hidden_ptr,
        weight_ptr,
        bias_ptr,
        tokens,
        start,
        n_tokens,
        n_words,
        hidden_size,
        inner,
        outer,
        IS_WHOLE,
        HAS_BIAS,
        IS_CAPPED,
        INTERPRETED,
        TOKENS,
        TILE,
        STEP,
    )
    rows = tokens % n_tokens
    is_token = (tokens < n_tokens)[:, None]
    ids = (tl.load(ids_ptr + rows).to(tl.int32) - start)[:, None]
    highest = tl.load(highest_ptr + rows)[:, None]
    log_sum = tl.load(log_sum_ptr + rows)[:, None]
    g = tl.load(log_prob_gradient_ptr + rows)[:, None]
    if HAS_ENTROPY:
        e = tl.load(entropy_gradient_ptr + rows)[:, None]
        constant = g + e * tl.load(entropy_ptr + rows)[:, None]
    out_ptrs = out_ptr + (tokens.to(tl.int64) * n_words + start)[:, None]
    # one half of the tile after the other: both at once do not fit into registers
    halves = tl.split(tl.permute(tl.reshape(logits, (TOKENS, 2, TILE // 2)), (0, 2, 1)))
    for half in tl.static_range(2):
        columns = half * (TILE // 2) + tl.arange(0, TILE // 2)
        is_word = columns < n_words - start
        # subtracted one after the other: the highest logit would absorb digits of log_sum
        log_p = halves[half] - highest - log_sum
        if HAS_ENTROPY:
            gradient = -(e * tl.maximum(log_p, vanishes) + constant) * tl.exp(log_p)
        else:
            gradient = -g * tl.exp(log_p)
        gradient += tl.where(columns[None, :] == ids, g, 0.0)
        if IS_CAPPED:  # d tanh(x) = 1 - tanh(x)^2
            capped = halves[half] / outer
            gradient *= 1 - capped * capped
        gradient *= inner * outer
        if HAS_SUMS:
            sums = tl.sum(tl.where(is_token, gradient, 0.0), 0)
            tl.store(column_sums_ptr + block.to(tl.int64) * n_words + start + columns, sums, mask=is_word)
        rounded = _rounded(gradient, out_ptr.dtype.element_ty, INTERPRETED)
        tl.store(out_ptrs + columns[None, :], rounded, mask=is_token & is_word[None, :])
