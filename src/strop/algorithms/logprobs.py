"""Log-probs of tokens, the entropy of their distributions and the full KL to a reference, chunk by chunk.

Shapes: N packed tokens, n tokens of one chunk, H hidden, V vocabulary.

For a batch of 64k tokens and a vocabulary of 150k, float32 logits take 39 GB. So the language-model head is
applied to one chunk of hidden states at a time, and recomputed in the backward pass: no tensor exceeds [n,
V]. A head that is a matrix needs even less (``strop.algorithms.output_layer``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from strop.algorithms.output_layer import OutputLayer, log_probs_and_entropy
from strop.algorithms.output_sums import VANISHES

_FORBIDDEN = -1e30
"""Words with a lower log-prob are forbidden: by a logit of -inf, or by the lowest number of a dtype."""

Project = Callable[[Tensor], Tensor]


class TokenLogProbs(NamedTuple):
    """Columns of N tokens, float32; None for a column that was not requested."""

    log_probs_N: Tensor
    """log p(token)"""
    entropy_N: Tensor | None
    """-sum_V p log p"""
    full_kl_N: Tensor | None
    """sum_V p (log p - log ref)"""


def token_log_probs(
    hidden_NH: Tensor,
    project: Project,
    ids_N: Tensor,
    *,
    temperature: float,
    with_entropy: bool = True,
    chunk_size: int = 1024,
    ref: tuple[Tensor, Project] | None = None,
) -> TokenLogProbs:
    """Compute log-probs of the tokens ``ids_N`` that follow the hidden states ``hidden_NH``; N may be 0.

    Args:
        hidden_NH: the last hidden state before each token.
        project: maps a chunk [n, H] to logits [n, V]: the language-model head and everything after it, such
            as soft-capping. An ``OutputLayer`` is computed in blocks of the vocabulary, unless there is a
            ``ref``. Any other function is called twice per chunk if there is a gradient and more than one
            chunk.
        ids_N: int64 token ids in [0, V).
        temperature: divides the logits, the reference's too.
        with_entropy: also return the entropies, with their gradient.
        chunk_size: tokens per chunk; a few float32 tensors [chunk_size, V] exist at a time.
        ref: hidden states [N, H'] and the projection of the reference model; adds the full KL to it, with the
            gradient to the policy only.
    """
    if len(hidden_NH) != len(ids_N):
        raise ValueError(f"{len(hidden_NH)} hidden states for {len(ids_N)} tokens")
    # the full KL needs the policy's and the reference's probability of a word at the same time
    if isinstance(project, OutputLayer) and ref is None:
        log_probs_N, entropy_N = log_probs_and_entropy(hidden_NH, project, ids_N, temperature=temperature)
        return TokenLogProbs(log_probs_N, entropy_N if with_entropy else None, None)
    ref_project = ref[1] if ref is not None else None

    def score(hidden_nH: Tensor, ids_n: Tensor, ref_hidden_nH: Tensor | None) -> TokenLogProbs:
        log_probs_nV = _log_softmax(project(hidden_nH), temperature)
        ref_log_probs_nV = None
        if ref_project is not None and ref_hidden_nH is not None:
            with torch.no_grad():
                ref_log_probs_nV = _log_softmax(ref_project(ref_hidden_nH), temperature)
        return _measure(log_probs_nV, ids_n, with_entropy, ref_log_probs_nV)

    # split, not slices: each slice's backward pass would make a gradient of full size
    hidden_chunks = hidden_NH.split(chunk_size)
    ref_chunks = ref[0].split(chunk_size) if ref is not None else [None] * len(hidden_chunks)
    recompute = torch.is_grad_enabled() and len(hidden_chunks) > 1  # with one chunk it saves no memory
    parts: list[TokenLogProbs] = []
    for chunk in zip(hidden_chunks, ids_N.split(chunk_size), ref_chunks, strict=True):
        if recompute:
            # a head draws no random numbers, so their state need not be saved
            parts.append(checkpoint(score, *chunk, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(score(*chunk))
    return TokenLogProbs(
        log_probs_N=torch.cat([part.log_probs_N for part in parts]),
        entropy_N=_join([part.entropy_N for part in parts]),
        full_kl_N=_join([part.full_kl_N for part in parts]),
    )


def _log_softmax(logits_nV: Tensor, temperature: float) -> Tensor:
    # before the division and the sum: bfloat16 logits near 20 have steps of 0.125
    logits_nV = logits_nV.float()
    if temperature != 1.0:
        logits_nV = logits_nV / temperature
    return logits_nV.log_softmax(-1)


def _measure(
    log_probs_nV: Tensor, ids_n: Tensor, with_entropy: bool, ref_log_probs_nV: Tensor | None
) -> TokenLogProbs:
    log_probs_n = log_probs_nV.gather(-1, ids_n.unsqueeze(-1)).squeeze(-1)
    entropy_n = full_kl_n = None
    if with_entropy or ref_log_probs_nV is not None:
        # Some models forbid tokens by a logit of -inf, and 0 x -inf would be NaN. In the backward pass this
        # number is multiplied by the upstream gradient before the 0, so it must be far from overflow.
        finite_nV = log_probs_nV.clamp(min=VANISHES)
        probs_nV = log_probs_nV.exp()
        if with_entropy:
            entropy_n = -(probs_nV * finite_nV).sum(-1)
        if ref_log_probs_nV is not None:
            # a clamp would also bound words that the reference allows, at a low temperature for example
            ref_log_probs_nV = ref_log_probs_nV.masked_fill(ref_log_probs_nV < _FORBIDDEN, VANISHES)
            full_kl_n = (probs_nV * (finite_nV - ref_log_probs_nV)).sum(-1)
    return TokenLogProbs(log_probs_n, entropy_n, full_kl_n)


def _join(parts: list[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None
