"""The generation loop: prefill every context once, then decode one token per step for unfinished samples.

A context is a prompt, or a prompt with the tokens that an earlier call has generated. Between the turns of
samples ``Kept`` has the keys and values of all rows but of their last token: the next call computes only what
was inserted since.

Shapes: B contexts, P context columns, R rows (samples), at most T new tokens, V vocabulary, S stop ids.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from strop.models.inputs import Features, PassInputs, Reader
from strop.protocol import padded_on_the_left
from strop.rollout.base import Advanced, Samples, SamplingParams
from strop.rollout.hf.kv_cache import DecodeCache, Span, decoding_attention, keys_and_values, to_the_front
from strop.rollout.sampling import next_tokens

_PREFILL_TOKENS = 8192
"""Tokens of contexts in one forward pass; bounds the activations of a large batch of long prompts."""
_COMPACT_BELOW = 0.9
"""Finished rows are dropped once this share or less is unfinished: copying the cache costs about one step."""

_LOOK_EVERY = 8
"""Steps from one look at stop ids to the next on a GPU, which waits for it; on a CPU every step has one."""


@dataclass(frozen=True)
class Contexts:
    """Left-padded contexts [B, P], and the index [R] of the context that each row continues."""

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    of_row: Tensor
    pictures: Mapping[str, Tensor]
    """Of contexts with pictures: ``images`` [B, I], the tokens ``continued`` [B] after the prompt, and
    ``images_at`` [B, most of these]."""

    def columns(self, chosen: Tensor, width: int) -> Mapping[str, Tensor]:
        """Return the last ``width`` columns of the ``chosen`` contexts, as a batch has them."""
        names = ("input_ids", "attention_mask", "position_ids")
        columns = {name: getattr(self, name)[chosen, -width:] for name in names}
        pictures = {name: column[chosen.cpu()] for name, column in self.pictures.items()}
        if "images_at" in pictures:
            pictures["images_at"] = pictures["images_at"][:, -width:]
        return {**columns, **pictures}

    @classmethod
    def pad(
        cls,
        contexts: Sequence[Tensor],
        of_row: Sequence[int],
        device: torch.device,
        pictures: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> Contexts:
        """Align token ids [length] of each context to the right, on ``device``."""
        columns = *padded_on_the_left(contexts).values(), torch.tensor(of_row)
        return cls(*(column.to(device) for column in columns), pictures)


class Kept:
    """Keys and values of samples from one ``decode`` to the next, with the same weights."""

    def __init__(self) -> None:
        self.cache: DecodeCache | None = None
        self._spans: dict[Hashable, tuple[int, int, int]] = {}
        """By name of a sample: its place in the cache, first column, and number of columns."""

    def keep(
        self, cache: DecodeCache, names: Sequence[Hashable], contexts: Contexts, lengths_R: Tensor
    ) -> None:
        """Take the cache of rows that have got ``lengths_R`` tokens."""
        assert cache.rows is not None
        before_R = contexts.attention_mask.sum(1)[contexts.of_row]
        places = cache.rows.argsort().tolist()
        first_R = contexts.attention_mask.shape[1] - before_R
        # the last token is not in the cache, or not in every row's
        columns = zip(places, first_R.tolist(), (before_R + lengths_R - 1).tolist(), strict=True)
        self.cache, self._spans = cache, dict(zip(names, columns, strict=True))

    def has(self, names: Sequence[Hashable]) -> bool:
        """Return True if all samples are there; forget them if not."""
        if self._spans.keys() >= set(names):
            return True
        self.cache, self._spans = None, {}
        return False

    def align(self, names: Sequence[Hashable], contexts: Contexts, tokens: int) -> tuple[DecodeCache, Tensor]:
        """Make room for ``contexts``, one for each sample; return how many of their tokens [R] are new."""
        assert self.cache is not None
        mask_RP = contexts.attention_mask
        width, lengths_R = mask_RP.shape[1], mask_RP.sum(1)
        known = [self._spans[name] for name in names]
        spans = [
            Span(place, first, width - length, columns)
            for (place, first, columns), length in zip(known, lengths_R.tolist(), strict=True)
        ]
        self.cache.align(spans, mask_RP.bool(), limit=width + tokens - 1)
        return self.cache, lengths_R - lengths_R.new_tensor([span.columns for span in spans])


def decode(
    model: PreTrainedModel,
    reader: Reader,
    windows: Sequence[int | None],
    contexts: Contexts,
    uniforms_RT: Tensor | None,
    limits: Sequence[int],
    params: SamplingParams,
    stop_ids_S: Tensor,
    cache_dtype: torch.dtype,
    *,
    awaited: int,
    finished: Callable[[int, list[int]], None] | None = None,
    advanced: Advanced | None = None,
    kept: Kept | None = None,
    names: Sequence[Hashable] = (),
    before_pass: Callable[[], None] = lambda: None,
) -> Samples:
    """Decode each row until a stop id or its limit; call it in eval mode, without gradient.

    Ends when the first ``awaited`` rows are complete; the others keep what they have by then. ``limits`` [R]
    are the tokens that each row may get, T the largest. ``truncated`` of the result: without a stop id.
    ``finished`` is called with the new tokens of rows that leave the batch before the awaited ones are
    complete. ``kept`` keeps the rows, by their ``names``; if it has all of them, they go on from there.
    ``before_pass`` is called before each forward pass; what it raises ends the call.
    """
    most, cuts = max(limits), set(limits)
    if kept is None or not kept.has(names):
        cache, logits_RV, position_R = _prefill(
            model, reader, windows, contexts, most, cache_dtype, before_pass, keeps=kept is not None
        )
    else:
        cache, logits_RV = _insert(model, kept, names, contexts, most, before_pass)
        position_R = contexts.position_ids[contexts.of_row, -1]
    total, device = len(logits_RV), logits_RV.device
    # by step: each step writes one contiguous row
    tokens_TR = torch.zeros(most, total, dtype=torch.long, device=device)
    log_probs_TR = torch.zeros(most, total, dtype=torch.float32, device=device)
    uniforms_TR = None if uniforms_RT is None else uniforms_RT.T.contiguous().to(device)
    limits_R = torch.tensor(limits, device=device)
    # State of the rows that are still in the batch:
    rows_R = torch.arange(total, device=device)
    active_R = torch.ones(total, dtype=torch.bool, device=device)
    awaited_R = rows_R < awaited
    positions_R1 = position_R[:, None]
    step, looked, left = 0, 0, awaited
    every = 1 if device.type == "cpu" else _LOOK_EVERY
    with decoding_attention(model):
        while True:
            uniforms_R = None if uniforms_TR is None else uniforms_TR[step].index_select(0, rows_R)
            tokens_R, step_log_probs_R = next_tokens(logits_RV, uniforms_R, params)
            tokens_TR[step].index_copy_(0, rows_R, tokens_R)
            log_probs_TR[step].index_copy_(0, rows_R, step_log_probs_R)
            step += 1
            keep = None
            if len(stop_ids_S) or step in cuts:
                active_R &= (tokens_R[:, None] != stop_ids_S).all(1) & (limits_R[rows_R] > step)
            # int() waits for the device, so without stop ids only steps at which a limit ends are examined
            if step in cuts or (len(stop_ids_S) and step % every == 0):
                before, left = left, int((active_R & awaited_R).sum())
                if advanced is not None:
                    advanced(before - left, before * (step - looked))
                looked = step
                if left == 0:
                    break
                active = left if awaited == total else int(active_R.sum())
                if active <= _COMPACT_BELOW * len(rows_R):
                    keep = active_R.nonzero()[:, 0] if kept is None else to_the_front(active_R)
                    if finished is not None:
                        ended_R = rows_R[~active_R]
                        _report(finished, ended_R, tokens_TR[:step], limits_R[ended_R], stop_ids_S)
                    rows_R, tokens_R = rows_R[keep], tokens_R[keep]
                    positions_R1, active_R = positions_R1[keep], active_R[keep]
                    awaited_R = awaited_R[keep]
            before_pass()
            positions_R1 = positions_R1 + 1
            inputs = PassInputs(tokens_R[:, None], positions_R1, cache.next_column(keep))
            logits_RV = _last_logits(model, inputs, past_key_values=cache)
    if every > 1:  # the last awaited row ended before the look: the others keep what they had by then
        step = int(_ends(tokens_TR[:step].T, limits_R, stop_ids_S)[0][:awaited].max())
    tokens_RT = tokens_TR[:step].T.contiguous()
    lengths_R, stopped_R = _ends(tokens_RT, limits_R, stop_ids_S)
    if kept is not None:
        kept.keep(cache, names, contexts, lengths_R)
    return Samples(tokens_RT, log_probs_TR[:step].T.contiguous(), lengths_R, ~stopped_R)


def _passes(lengths_B: Tensor, tokens: int | None = None) -> Iterator[tuple[int, Tensor]]:
    """Yield the indices of each pass, of similar lengths, with the longest of these.

    A pass has up to ``_PREFILL_TOKENS``, as many for each index as the longest, or ``tokens``.
    """
    order_B = lengths_B.argsort(descending=True, stable=True)
    start = 0
    while start < len(order_B):
        longest = int(lengths_B[order_B[start]])
        chosen = order_B[start : start + max(1, _PREFILL_TOKENS // (tokens or longest))]
        start += len(chosen)
        yield longest, chosen


def _prefill(
    model: PreTrainedModel,
    reader: Reader,
    windows: Sequence[int | None],
    contexts: Contexts,
    tokens: int,
    cache_dtype: torch.dtype,
    before_pass: Callable[[], None],
    *,
    keeps: bool,
) -> tuple[DecodeCache, Tensor, Tensor]:
    """Return a cache with every row's context, logits [R, V] of its first new token, and its last position.

    Contexts of similar length share a pass, without the columns that are padding in all of them.
    """
    cache: DecodeCache | None = None
    # samples in flight are contexts of their own, whose prompts' pictures are encoded once
    encoded: dict[int, Features] = {}
    order: list[Tensor] = []
    logits: list[Tensor] = []
    positions: list[Tensor] = []
    for longest, chosen in _passes(contexts.attention_mask.sum(1)):
        before_pass()
        prefilled = DynamicCache()
        inputs = reader.inputs(contexts.columns(chosen, longest), encoded=encoded)
        logits.append(_last_logits(model, inputs, past_key_values=prefilled))
        positions.append(inputs.last_position)
        states = keys_and_values(prefilled, len(windows))
        if cache is None:
            cache = DecodeCache(
                states,
                windows,
                prompt_mask=contexts.attention_mask[contexts.of_row].bool(),
                # the last token is not fed back
                limit=contexts.input_ids.shape[1] + tokens - 1,
                dtype=cache_dtype,
                keeps=keeps,
            )
        cache.write_prompts(states, *(contexts.of_row[:, None] == chosen).nonzero(as_tuple=True))
        order.append(chosen)
    assert cache is not None
    # argsort of the order is its inverse: from rows by length back to contexts
    row_R = torch.cat(order).argsort()[contexts.of_row]
    return cache, torch.cat(logits)[row_R], torch.cat(positions)[row_R]


def _insert(
    model: PreTrainedModel,
    kept: Kept,
    names: Sequence[Hashable],
    contexts: Contexts,
    tokens: int,
    before_pass: Callable[[], None],
) -> tuple[DecodeCache, Tensor]:
    """Add to the kept cache what its rows' contexts have more; return it, and logits as ``_prefill`` does."""
    cache, new_R = kept.align(names, contexts, tokens)
    order: list[Tensor] = []
    logits: list[Tensor] = []
    for longest, chosen in _passes(new_R, contexts.input_ids.shape[1]):
        before_pass()
        # rows with fewer new tokens compute some of the others again
        columns, past = contexts.columns(chosen, longest), cache.before(longest, chosen)
        mask = contexts.attention_mask[chosen]
        inputs = PassInputs(columns["input_ids"], columns["position_ids"], mask)
        logits.append(_last_logits(model, inputs, past_key_values=past))
        states = [
            (keys[:, :, -longest:], values[:, :, -longest:])
            for keys, values in keys_and_values(past, len(cache.layers))
        ]
        cache.write_prompts(states, chosen, torch.arange(len(chosen), device=chosen.device))
        order.append(chosen)
    return cache, torch.cat(logits)[torch.cat(order).argsort()]


def _last_logits(model: PreTrainedModel, inputs: PassInputs, *, past_key_values: Cache) -> Tensor:
    """Return the logits [R, V] after the last column; all columns are added to the cache."""
    # logits of all positions would be [R, P, V]
    options = {"past_key_values": past_key_values, "use_cache": True, "logits_to_keep": 1}
    with inputs.around(model):
        return model(**inputs.arguments(), **options).logits[:, -1]


def _report(
    finished: Callable[[int, list[int]], None],
    rows_R: Tensor,
    tokens_TR: Tensor,
    limits_R: Tensor,
    stop_ids_S: Tensor,
) -> None:
    tokens_RT = tokens_TR.index_select(1, rows_R).T
    lengths_R, _ = _ends(tokens_RT, limits_R, stop_ids_S)
    rows = zip(rows_R.tolist(), lengths_R.tolist(), tokens_RT.tolist(), strict=True)
    for row, length, token_ids in rows:
        finished(row, token_ids[:length])


def _ends(tokens_RT: Tensor, limits_R: Tensor, stop_ids_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return the length [R] up to the first stop id or the limit, and True [R] for rows with a stop id.

    Tokens of a row beyond its end are undefined, and may be stop ids.
    """
    tokens = tokens_RT.shape[1]
    stops_RT = (tokens_RT[..., None] == stop_ids_S).any(-1)
    stops_RT &= torch.arange(tokens, device=tokens_RT.device) < limits_R[:, None]
    stopped_R = stops_RT.any(1)
    return torch.where(stopped_R, stops_RT.int().argmax(1) + 1, limits_R.clamp(max=tokens)), stopped_R
