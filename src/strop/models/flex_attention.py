"""Attention of packed rows by torch's FlexAttention, for models loaded with ``flex_attention``.

One call attends over the whole row, with a mask of the tokens that attend to each other: no keys are copied
for samples that share a prompt, and their gradients add up inside the kernel. Blocks of 128 x 128 tokens that
the mask leaves out are skipped. The kernel is compiled at the first pass. Without a GPU torch computes all
N x N scores, and refuses gradients.

Shapes: N tokens of the packed row, Q query heads, G key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface

from strop.errors import ModelError
from strop.models.passes.graphs import many_graphs

FLEX = "flex_attention"
PACKED_FLEX = "strop_packed_flex"


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile attention, or masks, which depend on the row alone: for any length at once."""
    if function is create_block_mask:
        return torch.compile(function, dynamic=True)
    # As one operator, whose results selective checkpointing keeps.
    return torch.compile(function, options={"wrap_inductor_compiled_regions": True})


def _run(function: Callable[..., Any], on_gpu: bool, *args: Any, **options: Any) -> Any:
    """Call a function of FlexAttention, compiled ``on_gpu``.

    Operation by operation it would compute all N x N pairs, silently so past torch's limit of graphs.
    """
    if on_gpu:
        function = _compiled(function)
    with many_graphs():
        return function(*args, **options)


class Pieces:
    """Keys of each token of a packed row: earlier tokens of its piece, and all of one other piece."""

    def __init__(self, piece_N: Tensor, prompt_N: Tensor, place_N: Tensor) -> None:
        """Describe tokens on the device.

        Args:
            piece_N: number of each token's piece: a sequence, a prompt or a response.
            prompt_N: number of the piece before each token's own, -1 for none.
            place_N: index of each token in its sequence, for sliding windows.
        """
        self._columns = piece_N, prompt_N, place_N
        self._masks: dict[int | None, BlockMask] = {}

    def mask(self, window: int | None) -> BlockMask:
        """Return the mask for layers with a window of that many tokens, None for all."""
        if window not in self._masks:
            piece_N, prompt_N, place_N = self._columns

            def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                same = (piece_N[query] == piece_N[key]) & (key <= query)
                seen = same | (prompt_N[query] == piece_N[key])
                return seen if window is None else seen & (place_N[query] - place_N[key] < window)

            tokens, device = len(piece_N), piece_N.device
            on_gpu = device.type == "cuda"
            self._masks[window] = _run(
                create_block_mask, on_gpu, sees, None, None, tokens, tokens, device=device
            )
        return self._masks[window]


def _packed_flex(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    pieces: Pieces | None = None,
    sliding_window: int | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend: query [1, Q, N, D], key and value [1, G, N, D] -> [1, N, Q, D]."""
    if pieces is None:
        raise ModelError(
            f"{type(module).__name__} does not pass the lengths of packed sequences to attention"
        )
    cap, sinks_Q = softcap or 0.0, options.get("s_aux")
    if options.get("position_bias") is not None or options.get("dropout"):
        found = "dropout" if options.get("dropout") else "position_bias"
        raise ModelError(
            f"{type(module).__name__} uses {found}, which attn_implementation=flex_attention does not "
            "support; set attn_implementation to null"
        )

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    found = _run(
        flex_attention,
        query.device.type == "cuda",
        # flex_attention requires one dtype; norms of queries and keys may compute in float32
        query.to(value.dtype),
        key.to(value.dtype),
        value,
        score_mod=capped if cap else None,
        block_mask=pieces.mask(sliding_window),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=None if sinks_Q is None else AuxRequest(lse=True),
    )
    if sinks_Q is None:
        return found.transpose(1, 2), None
    output, sums = found
    # A sink is one more term in the denominator of softmax: e^lse / (e^lse + e^sink) of the weight is left.
    left_1QN = torch.sigmoid(sums.lse - sinks_Q[:, None])
    return (output * left_1QN[..., None].to(output.dtype)).transpose(1, 2), None


# No mask function is registered, so transformers makes no mask. Outside of the graphs of compiled layers, for
# which the mask of each row would be new; the kernel is a separate graph.
AttentionInterface.register(PACKED_FLEX, torch.compiler.disable(_packed_flex))
