"""Packed rows in megatron-core's layers: attention of each sequence to itself, and rotary positions.

megatron-core's own attention on packed rows needs Transformer Engine. ``PackedAttention`` calls the same
functions as packed passes of the engine ``fsdp`` (``strop.models.attention``), so windows, shared prompts and
flash-attention mean the same, and positions are rotated by the family's own module.

Shapes: N tokens of the row, M with padding to a multiple of the tensor-parallel size; Q query heads and G
key-value heads of this rank, A of either, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from strop.models.attention import row_attention
from strop.models.packing import Packing
from strop.models.routing import SequenceTokens


class Row:
    """A micro-batch as one packed row, passed through the layers in place of ``PackedSeqParams``."""

    qkv_format = "thd"  # megatron-core's layers then hand tokens to attention as [M, heads, D]

    def __init__(
        self,
        batch: Mapping[str, Tensor],
        packing: Packing,
        *,
        rotary: Callable[..., tuple[Tensor, Tensor]],
        implementation: str,
        multiple: int,
        at_least: int = 0,
    ) -> None:
        """Lay out the row, padded to a ``multiple`` of so many tokens, of ``at_least`` that many."""
        ids_1N = packing.pack(batch["input_ids"])
        self.n_tokens = ids_1N.shape[1]
        padding = max(-self.n_tokens % multiple, at_least - self.n_tokens)
        self.ids_1M = nn.functional.pad(ids_1N, (0, padding))
        cos_1ND, sin_1ND = rotary(torch.zeros(1, device=ids_1N.device), packing.pack(batch["position_ids"]))
        self.cos_N1D, self.sin_N1D = cos_1ND[0, :, None], sin_1ND[0, :, None]
        self.options = packing.options(implementation)
        self.tokens = SequenceTokens.of(batch, packing)


class PackedAttention(nn.Module):
    """Core attention of a layer, built by megatron-core."""

    is_causal = True

    def __init__(
        self, config: Any, layer_number: int, *, windows: Sequence[int | None], implementation: str, **_: Any
    ) -> None:
        super().__init__()
        # read by transformers' attention functions
        self.num_key_value_groups = config.num_attention_heads // config.num_query_groups
        self._window = windows[layer_number - 1]
        self._scaling = config.kv_channels**-0.5
        self._attend = AttentionInterface()[row_attention(implementation)]

    def forward(
        self,
        query_MQD: Tensor,
        key_MGD: Tensor,
        value_MGD: Tensor,
        attention_mask: None,
        *,
        packed_seq_params: Row,
        **_: Any,
    ) -> Tensor:
        """Return [M, Q x D]; 0 for padding."""
        row = packed_seq_params
        heads = [states[: row.n_tokens] for states in (query_MQD, key_MGD, value_MGD)]
        heads[:2] = [_rotated(states, row) for states in heads[:2]]
        attended_1NQD, _weights = self._attend(
            self,
            *(states.transpose(0, 1)[None] for states in heads),
            None,
            dropout=0.0,
            scaling=self._scaling,
            sliding_window=self._window,
            **row.options,
        )
        attended = attended_1NQD[0].flatten(1)
        return nn.functional.pad(attended, (0, 0, 0, len(query_MQD) - row.n_tokens))


def _rotated(states_NAD: Tensor, row: Row) -> Tensor:
    """Rotate the halves of every head by the token's position, as transformers' families do."""
    first, second = states_NAD.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    cos, sin = row.cos_N1D.to(states_NAD.dtype), row.sin_N1D.to(states_NAD.dtype)
    return states_NAD * cos + turned * sin
