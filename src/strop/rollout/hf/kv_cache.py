"""Decoding cache and attention: keys and values are written in place, never concatenated.

``DecodeCache`` holds preallocated columns of all layers and their mask. ``decoding_attention`` attends with
one new token per row without copying the cache for grouped heads. ``attention_windows`` checks that a model's
layers fit.

Shapes: R rows (samples), H key-value heads, D head width, P prompt columns, C columns allocated, L columns in
use, W a layer's attention window.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

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
    """Keys and values [R, H, C, D] of one layer; ``update`` adds one column."""

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
        self.stored_keys.narrow(2, self.length, 1).copy_(key_states)
        self.stored_values.narrow(2, self.length, 1).copy_(value_states)
        self.length += 1
        start = 0 if self.window is None else max(0, self.length - self.window)
        seen = self.length - start
        return self.stored_keys.narrow(2, start, seen), self.stored_values.narrow(2, start, seen)

    def get_seq_length(self) -> int:
        """Return the number of columns in use."""
        return self.length

    def resize(self, keep: Tensor | None, capacity: int) -> None:
        """Keep only the rows ``keep`` (None: all), with room for ``capacity`` columns."""
        self.stored_keys = _resized(self.stored_keys, keep, self.length, capacity)
        self.stored_values = _resized(self.stored_values, keep, self.length, capacity)


class DecodeCache(Cache):
    """All layers, and the mask over their columns; prompts are right-aligned in the first P columns."""

    layers: list[DecodeLayer]

    def __init__(
        self,
        like: Sequence[KeysAndValues],
        windows: Sequence[int | None],
        *,
        prompt_mask: Tensor,
        limit: int,
        dtype: torch.dtype,
    ) -> None:
        """Allocate room for the prompts of ``prompt_mask`` (bool [R, P]), growing up to ``limit`` columns.

        ``like`` gives heads and widths of every layer, ``windows`` each layer's window (None: unlimited).
        """
        rows, self.length = prompt_mask.shape
        self.limit = limit
        self.capacity = min(limit, self.length + _GROWTH)

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
        self._mask = torch.zeros(rows, 1, 1, limit, dtype=dtype, device=prompt_mask.device)
        self._mask[:, 0, 0, : self.length].masked_fill_(~prompt_mask, torch.finfo(dtype).min)

    def write_prompts(self, states: Sequence[KeysAndValues], rows: Tensor, sources: Tensor) -> None:
        """Copy prompts ``sources`` of ``states`` to ``rows``; a prompt is computed once for its samples."""
        for layer, (keys, values) in zip(self.layers, states, strict=True):
            # right-aligned: this pass may be narrower than the longest prompt
            start = self.length - keys.shape[2]
            layer.stored_keys[rows, :, start : self.length] = keys[sources].to(layer.stored_keys.dtype)
            layer.stored_values[rows, :, start : self.length] = values[sources].to(layer.stored_values.dtype)

    def next_column(self, keep: Tensor | None) -> Tensor | dict[str, Tensor]:
        """Make room for one column and return its additive mask, by kind of layer if there are two kinds.

        ``keep`` (row indices) drops all other rows.
        """
        full = self.length == self.capacity
        if full:
            self.capacity = min(self.limit, self.capacity + _GROWTH)
        if full or keep is not None:
            for layer in self.layers:
                layer.resize(keep, self.capacity)
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
        return self._mask[..., start : self.length]


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
    # time is that of reading the cache. Reading shared prompts once speeds attention up by 0.7 to 1.35.
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
    """Return each layer's attention window in tokens, including the current one; None: unlimited.

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
    return [window if kind == "sliding_attention" else None for kind in kinds]
