"""Ulysses sequence parallelism: the ranks of a group share packed rows, each with a piece of the tokens.

Every layer but attention treats tokens independently and runs on the rank's piece. Attention needs whole
sequences but treats heads independently: before it the ranks exchange heads for tokens, so that each has all
tokens of some heads, and after it they exchange them back (Jacobs et al., arXiv:2309.14509).
Per-token outputs are summed to whole ones on every rank, so losses of whole sequences need no second version.

Shapes: R ranks of a group, N tokens of a packed row, n = ceil(N / R) tokens of a piece, Q query heads, G
key-value heads, A of either, D head size, X any features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from strop.errors import ModelError

SHARED_ATTENTION = "strop_shared"  # no mask function is registered for it, so transformers makes no mask


class SequenceGroup:
    """Ranks that get the same batches and cut packed rows into pieces of equal length."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._process_group = process_group
        self.size = process_group.size()
        self.rank = process_group.rank()

    def piece_length(self, tokens: int) -> int:
        """Return n for a row of ``tokens``; the last pieces are padded."""
        return -(-tokens // self.size)

    def piece(self, row_N: Tensor) -> Tensor:
        """Return this rank's piece [n] of the row, padded with zeros."""
        length = self.piece_length(len(row_N))
        piece = row_N[self.rank * length : (self.rank + 1) * length]
        return nn.functional.pad(piece, (0, length - len(piece)))

    def sum_of_parts(self, part: Tensor) -> Tensor:
        """Return the sum over the ranks, each of which has zeros outside its part. Collective.

        Losses of the sum are equal on all ranks, and each rank's gradient goes into its own part alone.
        Summed over the ranks, as FSDP does, every part counts once.
        """
        return _SumOfParts.apply(part, self._process_group)

    def is_same(self, number: int, device: torch.device) -> bool:
        """Return True if all ranks of the group have this number. Collective."""
        # one reduction: the maximum of -x is minus the minimum of x
        ends = torch.tensor([number, -number], device=device)
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self._process_group)
        return int(ends[0]) == -int(ends[1])

    def exchange(self, parts_RX: Tensor) -> Tensor:
        """Send ``parts_RX[r]`` to rank r; return [R, ...] of what each rank sent. Differentiable."""
        return _Exchange.apply(parts_RX, self._process_group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts_RX: Tensor, process_group: dist.ProcessGroup) -> Tensor:
        ctx.process_group = process_group
        parts_RX = parts_RX.contiguous()
        received_RX = torch.empty_like(parts_RX)
        dist.all_to_all_single(received_RX, parts_RX, group=process_group)
        return received_RX

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(gradients[0], ctx.process_group), None  # an all-to-all is its own adjoint


class _SumOfParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, process_group: dist.ProcessGroup) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=process_group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # not summed over the ranks, as the adjoint of an all-reduce is: FSDP's reduction does that
        return gradients[0], None


@dataclass(frozen=True)
class SharedRow:
    """A packed row that is cut into pieces, as attention gets it."""

    group: SequenceGroup
    tokens: int
    """N, without the padding of the last pieces."""
    attention: str
    """Back-end that attends to a whole packed row."""

    def heads(self, *states: Tensor) -> list[Tensor]:
        """Exchange pieces of all heads [1, A, n, D] for all tokens of this rank's heads [1, A / R, N, D].

        All ``states`` go in one exchange; A and D may differ between them.
        """
        ranks = self.group.size
        to_each = [heads[0].transpose(0, 1).unflatten(1, (ranks, -1)) for heads in states]  # [n, R, A/R, D]
        widths = [heads.shape[2:] for heads in to_each]
        sent_RnX = torch.cat([heads.flatten(2) for heads in to_each], dim=2).transpose(0, 1)
        row_NX = self.group.exchange(sent_RnX).flatten(0, 1)[: self.tokens]
        parts = row_NX.split([math.prod(width) for width in widths], dim=1)
        return [
            part.unflatten(1, tuple(width)).transpose(0, 1)[None]
            for part, width in zip(parts, widths, strict=True)
        ]

    def pieces(self, row_1NAD: Tensor) -> Tensor:
        """Exchange all tokens of this rank's heads [1, N, A / R, D] for pieces of all heads [1, n, A, D]."""
        ranks, row_NAD = self.group.size, row_1NAD[0]
        # the padding of the last pieces, which heads() cut off
        filled = ranks * self.group.piece_length(self.tokens) - self.tokens
        row_NAD = nn.functional.pad(row_NAD, (0, 0, 0, 0, 0, filled))
        found_RnAD = self.group.exchange(row_NAD.unflatten(0, (ranks, -1)))
        return found_RnAD.transpose(0, 1).flatten(1, 2)[None]


class _Overlay:
    """Proxy of an object with other values for some attributes."""

    def __init__(self, target: Any, **attributes: Any) -> None:
        self.overlaid = target
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.overlaid, name)


def _shared_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    shared_row: SharedRow | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend over the whole row: query [1, Q, n, D], key and value [1, G, n, D] -> [1, n, Q, D].

    With fewer key-value heads than ranks, some ranks get the same head.
    """
    if shared_row is None or options.get("s_aux") is not None:  # s_aux: attention sinks, one per head
        raise ModelError(f"{type(module).__name__} does not pass pieces of packed rows to attention")
    copies = shared_row.group.size // math.gcd(key.shape[1], shared_row.group.size)
    key, value = (heads.repeat_interleave(copies, dim=1) for heads in (key, value))
    query, key, value = shared_row.heads(query, key, value)
    local = _Overlay(
        module,
        num_key_value_groups=query.shape[1] // key.shape[1],
        config=_Overlay(getattr(module, "config", None), _attn_implementation=shared_row.attention),
    )
    attend = ALL_ATTENTION_FUNCTIONS[shared_row.attention]
    output, _ = attend(local, query, key, value, attention_mask, **options)
    return shared_row.pieces(output), None


AttentionInterface.register(SHARED_ATTENTION, _shared_attention)


def check_shareable(model: PreTrainedModel, ranks: int) -> None:
    """Raise ``ModelError`` if ``ranks`` ranks cannot share the model's sequences; needs no weights."""
    config = model.config.get_text_config()
    found = f"ulysses_sequence_parallel_size={ranks}: {type(model).__name__}"
    heads = config.num_attention_heads
    if heads % ranks:
        raise ModelError(
            f"{found} has {heads} attention heads, expected a multiple of {ranks}; set it to a divisor of "
            f"{heads}"
        )
    if moving := _rope_types(config) & {"dynamic", "longrope"}:
        raise ModelError(
            f"{found} has rotary embeddings of type {', '.join(sorted(moving))}, which depend on the longest "
            "sequence of a pass, and each rank has only a piece; set it to 1"
        )


def _rope_types(config: Any) -> set[str]:
    """Return the kinds of rotary embedding over all layers."""
    parameters = getattr(config, "rope_parameters", None) or {}  # absent without rotary embeddings
    by_layer_type = [kind for kind in parameters.values() if isinstance(kind, dict)]
    return {str(kind.get("rope_type", "default")) for kind in by_layer_type or [parameters]}
