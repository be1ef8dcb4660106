"""torch's own flash-attention for sequences of different lengths, on a GPU in 16 bits.

Shapes: M queries or keys of all sequences, Q query heads, G key-value heads, D head size.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

_LARGEST_HEAD, _HEAD_STEP = 256, 8
"""Largest head size of flash-attention, and the number that its head sizes are multiples of."""


def takes_lengths(query: Tensor, value: Tensor) -> bool:
    """Return True if torch's own flash-attention for sequences of different lengths can attend here."""
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == value.shape[-1] <= _LARGEST_HEAD
        and query.shape[-1] % _HEAD_STEP == 0  # sdpa pads others
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def attention_by_lengths(
    query_MQD: Tensor,
    key_MGD: Tensor,
    value_MGD: Tensor,
    q_ends: Tensor,
    k_ends: Tensor,
    longest_q: int,
    longest_k: int,
    window: int | None,
    scaling: float | None,
) -> Tensor:
    """Call torch's flash-attention for sequences of different lengths, which end at ``ends`` -> [M, Q, D].

    The last query of a sequence attends to its last key.
    """
    # Imported here: the module imports torch's compiler, which takes seconds.
    varlen_attn: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    is_grouped = query_MQD.shape[1] != key_MGD.shape[1]
    groups = {"enable_gqa": is_grouped} if _has_enable_gqa(varlen_attn) else {}
    return varlen_attn(
        *(query_MQD, key_MGD, value_MGD),
        *(q_ends, k_ends, longest_q, longest_k),
        scale=scaling,
        # transformers counts the token itself, flash-attention those before it; 0 after it: causal
        window_size=(-1 if window is None else window - 1, 0),
        **groups,
    )


@cache
def _has_enable_gqa(varlen_attn: Callable[..., Any]) -> bool:
    """Return True if grouped heads need the option ``enable_gqa``, which torch 2.11 does not have."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters
