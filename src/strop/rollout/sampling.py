"""Sample the next token from logits, with one uniform number per (sample, token).

The numbers come from a sample's seed, and the token from the inverse of the cumulative distribution. So a
sample does not depend on the other samples in the batch, nor on their order.

Shapes: R rows, V vocabulary, K candidates, T tokens; N blocks of B weights.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from strop.rollout.base import SamplingParams

_CHUNK_ON_CPU, _CHUNK = 1 << 20, 1 << 24
"""Logits processed at a time. Temporaries [R, V] beyond a CPU's caches are several times slower; a GPU takes
110 rows of 152,000 words, with temporaries of 64 MiB each."""
_BLOCK = 256
"""Weights of a block: about the square root of a vocabulary, so that both levels have as many sums."""
_NUCLEUS_GUESS = 1024
"""Candidates that top_p considers first; sorting a whole vocabulary takes longer than the model."""


def draw_uniforms(seeds: Iterable[int], tokens: int) -> Tensor:
    """Draw numbers in [0, 1), float64 [R, T] on the CPU, row r from a generator seeded with seeds[r].

    A larger T extends each stream without changing its beginning.
    """
    seeds = list(seeds)
    # float32 numbers are multiples of 2^-24: words less likely than that could not be drawn
    uniforms_RT = torch.empty(len(seeds), tokens, dtype=torch.float64)
    generator = torch.Generator()
    for seed, row_T in zip(seeds, uniforms_RT, strict=True):
        row_T.uniform_(generator=generator.manual_seed(seed))
    return uniforms_RT


def next_tokens(
    logits_RV: Tensor, uniforms_R: Tensor | None, params: SamplingParams
) -> tuple[Tensor, Tensor]:
    """Return token ids [R] and their float32 log-probs [R].

    Sampling: log-probs of the distribution that is sampled from: logits / temperature, top-k, top-p,
    renormalised. Greedy (``uniforms_R`` is unused): the likeliest token, the lowest id of equals, with its
    log-prob at temperature 1.
    """
    chunk = _CHUNK_ON_CPU if logits_RV.device.type == "cpu" else _CHUNK
    rows = max(1, chunk // logits_RV.shape[-1])
    parts = []
    for start in range(0, len(logits_RV), rows):
        chunk_RV = logits_RV[start : start + rows].float()
        if params.greedy or uniforms_R is None:
            parts.append(_greedy(chunk_RV))
            continue
        if params.temperature != 1:
            chunk_RV = chunk_RV / params.temperature
        chunk_uniforms_R = uniforms_R[start : start + rows]
        if params.filtered:
            parts.append(_sample_filtered(chunk_RV, chunk_uniforms_R, params.top_k, params.top_p))
        else:
            parts.append(_sample(chunk_RV, chunk_uniforms_R))
    if len(parts) == 1:
        return parts[0]
    tokens, log_probs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(log_probs)


def _greedy(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    tokens_R1 = logits_RV.argmax(-1, keepdim=True)
    log_probs_R1 = torch.log_softmax(logits_RV, -1).gather(1, tokens_R1)
    return tokens_R1[:, 0], log_probs_R1[:, 0]


def _sample(scores_RV: Tensor, uniforms_R: Tensor) -> tuple[Tensor, Tensor]:
    # Not exp(log_softmax): one pass over the vocabulary and one allocation fewer, half of the time.
    probs_RV = torch.softmax(scores_RV, -1)
    tokens_R1 = invert_cdf(probs_RV, uniforms_R)
    return tokens_R1[:, 0], probs_RV.gather(1, tokens_R1)[:, 0].log()


def _sample_filtered(
    scores_RV: Tensor, uniforms_R: Tensor, top_k: int, top_p: float, guess: int = _NUCLEUS_GUESS
) -> tuple[Tensor, Tensor]:
    """Sample after top-k, then top-p. Of tied logits at the border only as many stay as needed."""
    vocabulary = scores_RV.shape[-1]
    width = min(top_k if top_k > 0 else guess, vocabulary)
    scores_RK, ids_RK = scores_RV.topk(width, dim=-1)
    # after top-k the rest has no probability; without it the candidates are a guess
    total_R1 = (scores_RK if top_k > 0 else scores_RV).logsumexp(-1, keepdim=True)
    probs_RK = (scores_RK - total_R1).double().exp()
    cumulative_RK = probs_RK.cumsum(-1)
    if top_p < 1:
        # the probability before a word: the word that crosses top_p stays, so one always does
        scores_RK = scores_RK.masked_fill(cumulative_RK - probs_RK >= top_p, -torch.inf)
    kept_R, log_probs_R = _sample(scores_RK, uniforms_R)
    tokens_R = ids_RK.gather(1, kept_R[:, None])[:, 0]
    if top_k <= 0 and width < vocabulary:
        short_R = cumulative_RK[:, -1] < top_p
        if short_R.any():
            # Only these rows, not the whole batch: no row's tokens may depend on the other rows.
            tokens_R[short_R], log_probs_R[short_R] = _sample_filtered(
                scores_RV[short_R], uniforms_R[short_R], top_k, top_p, guess=vocabulary
            )
    return tokens_R, log_probs_R


def invert_cdf(weights_RV: Tensor, uniforms_R: Tensor) -> Tensor:
    """Return the first index [R, 1] at which the running sum of the weights exceeds uniform x total.

    Never an index of weight 0. Two levels, first the block by sums of blocks, then the place in it: a float64
    running sum over a vocabulary of 32,000 would take as long as the output layer.
    """
    rows, vocabulary = weights_RV.shape
    if vocabulary <= 2 * _BLOCK:
        cumulative_RV = weights_RV.cumsum(-1, dtype=torch.float64)
        return _first_above(cumulative_RV, uniforms_R[:, None] * cumulative_RV[:, -1:])
    if vocabulary % _BLOCK:
        weights_RV = torch.nn.functional.pad(weights_RV, (0, -vocabulary % _BLOCK))
    blocks_RNB = weights_RV.view(rows, -1, _BLOCK)
    sums_RN = blocks_RNB.sum(-1).cumsum(-1, dtype=torch.float64)
    target_R1 = uniforms_R[:, None] * sums_RN[:, -1:]
    block_R1 = _first_above(sums_RN, target_R1)
    before_R1 = sums_RN.gather(1, (block_R1 - 1).clamp(min=0)).masked_fill(block_R1 == 0, 0.0)
    row_R = torch.arange(rows, device=weights_RV.device)
    inside_RB = blocks_RNB[row_R, block_R1[:, 0]].cumsum(-1, dtype=torch.float64)
    index_R1 = block_R1 * _BLOCK + _first_above(inside_RB, target_R1 - before_R1)
    return index_R1.clamp_(max=vocabulary - 1)  # NaN weights give an index in the padding


def _first_above(cumulative_RN: Tensor, target_R1: Tensor) -> Tensor:
    """Return the first index [R, 1] whose running sum exceeds the target (at most the last positive one)."""
    total_R1 = cumulative_RN[:, -1:]
    below_total_R1 = torch.nextafter(
        total_R1, torch.zeros_like(total_R1)
    )  # the target may round up to the total
    # right: the first sum above the target, which skips words of weight 0
    index_R1 = torch.searchsorted(cumulative_RN, torch.minimum(target_R1, below_total_R1), right=True)
    return index_R1.clamp_(max=cumulative_RN.shape[-1] - 1)  # NaN weights give an index past the end
