"""Decoding cache and attention: keys and values are written in place, never concatenated.

``DecodeCache`` holds preallocated columns of all layers and their mask. ``decoding_attention`` attends with
one new token per row without copying the cache for grouped heads. ``attention_windows`` checks that a model's
layers fit.

Between the turns of samples a cache is kept: rows whose turn has ended stay behind those that are decoded,
``align`` moves each row to the left of the tokens that it gets, and ``write_prompts`` adds these.

Shapes: R rows (samples), H key-value heads, D head width, P prompt columns, C columns allocated, L columns in
use, W a layer's attention window.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from strop.errors import ModelError
from strop.models.attention import attention_set_to
from strop.models.transformers_private import attention_name

_GROWTH = 128
"""Columns added at a time: a copy every 128 steps is cheap, and short responses waste little."""
_GROUPED = "strop_grouped_sdpa"

KeysAndValues = tuple[Tensor, Tensor]


class Span(NamedTuple):
    """Columns of a row that move."""

    place: int
    """Of the row, before."""
    first: int
    """The first column, before."""
    begin: int
    """The first column, after."""
    columns: int


def keys_and_values(prefilled: DynamicCache, layers: int) -> list[KeysAndValues]:
    """Return the keys and values [B, H, P, D] of each layer after a forward pass over prompts.

    Raises ``ModelError`` if the cache lacks keys and values of every token for every layer.
    """
    pairs = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in prefilled.layers]
    usable = [(k, v) for k, v in pairs if k is not None and v is not None and k.dim() == v.dim() == 4]
    if len(usable) != layers:
        raise ModelError(
            f"rollout.name=hf: the model filled {len(usable)} of {layers} cache layers with keys and values; "
            "layers that share a cache or keep another state are not supported"
        )
    return usable


class DecodeLayer(DynamicLayer):
    """Keys and values [R, H, C, D] of one layer; ``update`` adds one column to the first rows."""

    def __init__(self, keys: Tensor, values: Tensor, length: int, window: int | None) -> None:
        super().__init__()
        self.stored_keys = keys
        self.stored_values = values
        self.length = length
        self.window = window
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a new column [R, H, 1, D]; return the columns that it attends to, [R, H, W or L, D]."""
        keys, values = (
            stored.narrow(0, 0, len(key_states)) for stored in (self.stored_keys, self.stored_values)
        )
        keys.narrow(2, self.length, 1).copy_(key_states)
        values.narrow(2, self.length, 1).copy_(value_states)
        self.length += 1
        start = 0 if self.window is None else max(0, self.length - self.window)
        seen = self.length - start
        return keys.narrow(2, start, seen), values.narrow(2, start, seen)

    def get_seq_length(self) -> int:
        """Return the number of columns in use."""
        return self.length

    def resize(self, keep: Tensor | None, capacity: int) -> None:
        """Keep only the rows ``keep`` (None: all), with room for ``capacity`` columns."""
        self.stored_keys = _resized(self.stored_keys, keep, self.length, capacity)
        self.stored_values = _resized(self.stored_values, keep, self.length, capacity)

    def move(self, places: Tensor, sources: Tensor) -> None:
        """Replace the rows at ``places`` by those at ``sources``."""
        for stored in (self.stored_keys, self.stored_values):
            used = stored.narrow(2, 0, self.length)
            used[places] = used[sources]

    def align(self, spans: Sequence[Span], length: int, capacity: int) -> None:
        """Keep the rows of ``spans``, with room for ``capacity`` columns, ``length`` of which are in use."""
        self.stored_keys = _aligned(self.stored_keys, spans, capacity)
        self.stored_values = _aligned(self.stored_values, spans, capacity)
        self.length = length


class DecodeCache(Cache):
    """All layers, and the mask over their columns; prompts are right-aligned in the first P columns."""

    layers: list[DecodeLayer]
    rows: Tensor | None = None
    """Number of the row [R] at each place, those in use first; None: only rows in use are stored."""

    def __init__(
        self,
        like: Sequence[KeysAndValues],
        windows: Sequence[int | None],
        *,
        prompt_mask: Tensor,
        limit: int,
        dtype: torch.dtype,
        keeps: bool = False,
    ) -> None:
        """Allocate room for the prompts of ``prompt_mask`` (bool [R, P]), growing up to ``limit`` columns.

        ``like`` gives heads and widths of every layer, ``windows`` each layer's window (None: unlimited).
        ``keeps``: rows stay that are no longer in use.
        """
        rows = len(prompt_mask)
        self._dtype = dtype
        self._begin(prompt_mask, limit, keeps)

        def room(states: Tensor) -> Tensor:
            # Zeros instead of empty: masked columns are multiplied by 0, and 0 x NaN is NaN.
            return states.new_zeros(rows, states.shape[1], self.capacity, states.shape[3], dtype=dtype)

        super().__init__(
            layers=[
                DecodeLayer(room(keys), room(values), self.length, window)
                for (keys, values), window in zip(like, windows, strict=True)
            ]
        )
        self._windows = tuple(dict.fromkeys(windows))

    def _begin(self, prompt_mask: Tensor, limit: int, keeps: bool) -> None:
        rows, self.length = prompt_mask.shape
        self.limit, self.capacity = limit, min(limit, self.length + _GROWTH)
        self._mask = torch.zeros(rows, 1, 1, limit, dtype=self._dtype, device=prompt_mask.device)
        self._mask[:, 0, 0, : self.length].masked_fill_(~prompt_mask, torch.finfo(self._dtype).min)
        self.rows = torch.arange(rows, device=prompt_mask.device) if keeps else None

    def align(self, spans: Sequence[Span], prompt_mask: Tensor, limit: int) -> None:
        """Keep the rows of ``spans``; their new prompts are those of ``prompt_mask``."""
        self._begin(prompt_mask, limit, keeps=True)
        for layer in self.layers:
            layer.align(spans, self.length, self.capacity)

    def before(self, columns: int, rows: Tensor) -> DynamicCache:
        """Return a copy of the prompts of ``rows``, without the last ``columns``."""
        found, seen = DynamicCache(), self.length - columns
        for number, layer in enumerate(self.layers):
            found.update(layer.stored_keys[rows, :, :seen], layer.stored_values[rows, :, :seen], number)
        return found

    def write_prompts(self, states: Sequence[KeysAndValues], rows: Tensor, sources: Tensor) -> None:
        """Copy prompts ``sources`` of ``states`` to ``rows``; a prompt is computed once for its samples."""
        for layer, (keys, values) in zip(self.layers, states, strict=True):
            # right-aligned: this pass may be narrower than the longest prompt
            start = self.length - keys.shape[2]
            layer.stored_keys[rows, :, start : self.length] = keys[sources].to(layer.stored_keys.dtype)
            layer.stored_values[rows, :, start : self.length] = values[sources].to(layer.stored_values.dtype)

    def next_column(self, keep: Tensor | None) -> Tensor | dict[str, Tensor]:
        """Make room for one column and return its additive mask, by kind of layer if there are two kinds.

        ``keep`` (row indices) are the rows in use from now on, in this order: all others are dropped, or
        change places with those of ``keep`` behind them (``keeps``, ``to_the_front``).
        """
        full = self.length == self.capacity
        if full:
            self.capacity = min(self.limit, self.capacity + _GROWTH)
        if keep is not None and self.rows is not None:
            place = torch.arange(len(keep), device=keep.device)[keep >= len(keep)]
            places, sources = torch.cat([place, keep[place]]), torch.cat([keep[place], place])
            self.rows[places] = self.rows[sources]
            for layer in self.layers:
                layer.move(places, sources)
        dropping = keep if self.rows is None else None
        if full or dropping is not None:
            for layer in self.layers:
                layer.resize(dropping, self.capacity)
        if keep is not None:
            self._mask = self._mask.index_select(0, keep)
        self.length += 1
        masks = {window: self._visible(window) for window in self._windows}
        if len(masks) == 1:
            return masks[self._windows[0]]
        return {
            "full_attention" if window is None else "sliding_attention": mask
            for window, mask in masks.items()
        }

    def _visible(self, window: int | None) -> Tensor:
        start = 0 if window is None else max(0, self.length - window)
        mask = self._mask[..., start : self.length]
        # torch's attention kernel for GPUs refuses a mask that does not begin at a multiple of 16 bytes
        return mask.clone() if start else mask


def to_the_front(active_R: Tensor) -> Tensor:
    """Return the indices of the active rows, in an order in which those of the first places stay there."""
    order_R = torch.arange(len(active_R), device=active_R.device)
    first = int(active_R.sum())
    order_R[:first][~active_R[:first]] = order_R[first:][active_R[first:]]
    return order_R[:first]


def _aligned(states: Tensor, spans: Sequence[Span], capacity: int) -> Tensor:
    # Zeros, as at first. A row at a time takes less than an indexed copy of all: blocks of memory are copied.
    aligned = states.new_zeros(len(spans), states.shape[1], capacity, states.shape[3])
    for row, (place, first, begin, columns) in zip(aligned, spans, strict=True):
        row[:, begin : begin + columns] = states[place, :, first : first + columns]
    return aligned


def _resized(states: Tensor, keep: Tensor | None, used: int, capacity: int) -> Tensor:
    if capacity == states.shape[2]:
        return states if keep is None else states.index_select(0, keep)
    rows = len(states) if keep is None else len(keep)
    # empty, unlike the first columns: those past ``used`` are written before they are attended to
    grown = states.new_empty(rows, states.shape[1], capacity, states.shape[3])
    columns = states.narrow(2, 0, used)
    grown[:, :, :used] = columns if keep is None else columns.index_select(0, keep)
    return grown


def _grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend: query [R, heads, 1, D], key and value [R, groups, L, D], mask [R, 1, 1, L] -> [R, 1, heads, D].

    ``options`` are arguments that transformers' ``sdpa`` ignores, too.
    """
    rows, heads, queries, _ = query.shape
    if queries != 1:
        raise ModelError(
            f"{type(module).__name__} attends with {queries} queries in a decoding step, expected 1"
        )
    groups = key.shape[1]
    # the heads of a group as its queries: keys and values are read once and not repeated
    grouped_query = query.reshape(rows, groups, heads // groups, -1)
    if heads == groups and query.dtype == torch.bfloat16 and query.device.type == "cpu":
        # torch's kernel takes 0.4 to 0.9 of the time for two bfloat16 rows of a head instead of one.
        grouped_query = grouped_query.repeat(1, 1, 2, 1)
    # On a CPU two batched products leave generation as it is (1.00 with 16 and 64 rows in float32): the
    # time is that of reading the cache. A prompt read once for its 8 samples, by a call of its own whose
    # result is merged by log-sums: 0.6 to 1.4 of this speed after 64 tokens, 1.2 to 2.1 after 256.
    output = nn.functional.scaled_dot_product_attention(
        grouped_query, key, value, attn_mask=attention_mask, scale=scaling
    )
    return output[:, :, : heads // groups].reshape(rows, 1, heads, -1), None


AttentionInterface.register(_GROUPED, _grouped_attention)


def decoding_attention(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Replace ``sdpa`` by grouped attention in the body.

    ``eager`` stays: some families (Gemma 2) cap attention scores only there. Call it under
    ``portable_attention``.
    """
    implementation = attention_name(model.config)
    return attention_set_to(model, _GROUPED if implementation == "sdpa" else implementation)


def attention_windows(config: PreTrainedConfig) -> list[int | None]:
    """Return the attention window in tokens, including the current one, of each layer with keys of its own.

    None: unlimited. Last layers may read the keys of earlier ones (Gemma 3n).
    Raises ``ModelError`` for layers whose state is not keys and values of every token.
    """
    text = config.get_text_config(decoder=True)
    window = getattr(text, "sliding_window", None)  # absent without windows
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        kinds = ["full_attention" if window is None else "sliding_attention"] * text.num_hidden_layers
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or config.is_encoder_decoder:
        reason = f"layers of type {', '.join(unknown)}" if unknown else "an encoder"
        raise ModelError(
            f"rollout.name=hf cannot generate with {config.model_type}: it has {reason}, and only decoders "
            "with full or sliding-window attention are supported"
        )
    n_shared = getattr(text, "num_kv_shared_layers", 0) or 0
    return [window if kind == "sliding_attention" else None for kind in kinds[: len(kinds) - n_shared]]
