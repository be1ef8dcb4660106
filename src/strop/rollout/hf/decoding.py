"""The generation loop: prefill every prompt once, then decode one token per step for unfinished samples.

Shapes: B prompts, P prompt columns, R rows (samples), at most T tokens, V vocabulary, S stop ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from strop.rollout.base import Samples, SamplingParams
from strop.rollout.hf.kv_cache import DecodeCache, decoding_attention, keys_and_values
from strop.rollout.sampling import next_tokens

_PREFILL_TOKENS = 8192
"""Prompt tokens in one forward pass; bounds the activations of a large batch of long prompts."""
_COMPACT_BELOW = 0.9
"""Finished rows are dropped once this share or less is unfinished: copying the cache costs about one step."""


@dataclass(frozen=True)
class Prompts:
    """Left-padded prompts [B, P], and the index [R] of the prompt that each row continues."""

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    of_row: Tensor


def decode(
    model: PreTrainedModel,
    windows: Sequence[int | None],
    prompts: Prompts,
    uniforms_RT: Tensor | None,
    params: SamplingParams,
    stop_ids_S: Tensor,
    cache_dtype: torch.dtype,
    finished: Callable[[int, list[int]], None] | None = None,
) -> Samples:
    """Decode every row until a stop id or ``params.max_tokens``; call it in eval mode, without gradient.

    ``finished`` is called with the tokens of rows that leave the batch before the others.
    """
    cache, logits_RV = _prefill(model, windows, prompts, params.max_tokens, cache_dtype)
    total, device = len(logits_RV), logits_RV.device
    tokens_TR = torch.zeros(params.max_tokens, total, dtype=torch.long, device=device)
    log_probs_TR = torch.zeros(params.max_tokens, total, dtype=torch.float32, device=device)
    uniforms_TR = None if uniforms_RT is None else uniforms_RT.T.contiguous().to(device)
    # State of the rows that are still in the batch, in order:
    rows_R = torch.arange(total, device=device)
    active_R = torch.ones(total, dtype=torch.bool, device=device)
    positions_R1 = prompts.position_ids[prompts.of_row, -1:]
    with decoding_attention(model):
        for step in range(params.max_tokens):
            uniforms_R = None if uniforms_TR is None else uniforms_TR[step].index_select(0, rows_R)
            tokens_R, step_log_probs_R = next_tokens(logits_RV, uniforms_R, params)
            tokens_TR[step].index_copy_(0, rows_R, tokens_R)
            log_probs_TR[step].index_copy_(0, rows_R, step_log_probs_R)
            keep = None
            if len(stop_ids_S):
                active_R &= (tokens_R[:, None] != stop_ids_S).all(1)
                active = int(active_R.sum())
                if active == 0:
                    break
                if active <= _COMPACT_BELOW * len(rows_R):
                    keep = active_R.nonzero()[:, 0]
                    if finished is not None:
                        _report(finished, rows_R[~active_R], tokens_TR[: step + 1], stop_ids_S)
                    rows_R, tokens_R = rows_R[keep], tokens_R[keep]
                    positions_R1, active_R = positions_R1[keep], active_R[keep]
            if step + 1 == params.max_tokens:
                break
            positions_R1 = positions_R1 + 1
            logits_RV = _last_logits(
                model, tokens_R[:, None], cache.next_column(keep), positions_R1, past_key_values=cache
            )
    return _samples(tokens_TR, log_probs_TR, stop_ids_S)


def _prefill(
    model: PreTrainedModel,
    windows: Sequence[int | None],
    prompts: Prompts,
    tokens: int,
    cache_dtype: torch.dtype,
) -> tuple[DecodeCache, Tensor]:
    """Return a cache with every row's prompt, and the logits [R, V] of every row's first token.

    Prompts of similar length share a pass, without the columns that are padding in all of them.
    """
    lengths_B = prompts.attention_mask.sum(1)
    order_B = lengths_B.argsort(descending=True, stable=True)
    cache: DecodeCache | None = None
    logits: list[Tensor] = []
    start = 0
    while cache is None or start < len(order_B):
        longest = int(lengths_B[order_B[start]])
        chosen = order_B[start : start + max(1, _PREFILL_TOKENS // longest)]
        start += len(chosen)
        columns = (prompts.input_ids, prompts.attention_mask, prompts.position_ids)
        prefilled = DynamicCache()
        logits.append(
            _last_logits(model, *(column[chosen, -longest:] for column in columns), past_key_values=prefilled)
        )
        states = keys_and_values(prefilled, len(windows))
        if cache is None:
            cache = DecodeCache(
                states,
                windows,
                prompt_mask=prompts.attention_mask[prompts.of_row].bool(),
                limit=prompts.input_ids.shape[1] + tokens - 1,
                dtype=cache_dtype,
            )
        cache.write_prompts(states, *(prompts.of_row[:, None] == chosen).nonzero(as_tuple=True))
    return cache, torch.cat(logits)[order_B.argsort()[prompts.of_row]]


def _last_logits(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | dict[str, Tensor],
    position_ids: Tensor,
    *,
    past_key_values: Cache,
) -> Tensor:
    """Return the logits [R, V] after the last column; all columns are added to the cache."""
    return model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        use_cache=True,
        logits_to_keep=1,
    ).logits[:, -1]


def _report(
    finished: Callable[[int, list[int]], None], rows_R: Tensor, tokens_TR: Tensor, stop_ids_S: Tensor
) -> None:
    tokens_RT = tokens_TR.index_select(1, rows_R).T
    ends_R = (tokens_RT[..., None] == stop_ids_S).any(-1).int().argmax(1) + 1
    rows = zip(rows_R.tolist(), ends_R.tolist(), tokens_RT.tolist(), strict=True)
    for row, end, token_ids in rows:
        finished(row, token_ids[:end])


def _samples(tokens_TR: Tensor, log_probs_TR: Tensor, stop_ids_S: Tensor) -> Samples:
    """Cut each row at its first stop id; later tokens of the row are undefined."""
    tokens_RT = tokens_TR.T.contiguous()
    stops_RT = (tokens_RT[..., None] == stop_ids_S).any(-1)
    stopped_R = stops_RT.any(1)
    return Samples(
        tokens=tokens_RT,
        log_probs=log_probs_TR.T.contiguous(),
        lengths=torch.where(stopped_R, stops_RT.int().argmax(1) + 1, tokens_RT.shape[1]),
        truncated=~stopped_R,
    )
