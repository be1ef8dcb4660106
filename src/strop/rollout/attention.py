"""Attention of one new token over the cache, without copying the cache for grouped heads.

transformers repeats keys and values once per query head before attention. For one query that copy costs 3
to 25 times the attention itself (measured on a CPU). Here the query heads that share a key-value head are
handed to the kernel as so many queries of that head, which is the same sum.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from strop.errors import ModelError

_GROUPED = "strop_grouped_sdpa"


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
    """Query [R, heads, 1, D], key and value [R, groups, L, D], mask [R, 1, 1, L] -> [R, 1, heads, D].

    ``options`` are what transformers passes to every back-end and its own ``sdpa`` ignores as well.
    """
    rows, heads, queries, _ = query.shape
    if queries != 1:
        raise ModelError(
            f"{type(module).__name__} attends with {queries} queries in a decoding step, expected 1"
        )
    groups = key.shape[1]
    grouped_query = query.reshape(rows, groups, heads // groups, -1)
    output = nn.functional.scaled_dot_product_attention(
        grouped_query, key, value, attn_mask=attention_mask, scale=scaling
    )
    return output.reshape(rows, 1, heads, -1), None


AttentionInterface.register(_GROUPED, _grouped_attention)


@contextmanager
def decoding_attention(model: PreTrainedModel) -> Generator[None]:
    """The model's attention, replaced by the grouped one if it is ``sdpa``; afterwards as before.

    ``eager`` stays: some families (Gemma 2) cap their attention scores there and nowhere else.
    """
    config = model.config
    before = config._attn_implementation
    if before == "sdpa":
        config._attn_implementation = _GROUPED
    try:
        yield
    finally:
        config._attn_implementation = before


def attention_windows(config: PreTrainedConfig) -> list[int | None]:
    """How many tokens each layer sees, itself included; None: all.

    Raises ``ModelError`` for layers that keep something else than keys and values of every token, and for
    attention back-ends whose masks are not matrices.
    """
    if config._attn_implementation not in ("sdpa", "eager"):
        raise ModelError(
            f"rollout.name=hf generates with attn_implementation sdpa or eager, not "
            f"{config._attn_implementation!r}; set actor_rollout_ref.model.attn_implementation=sdpa"
        )
    text = config.get_text_config(decoder=True)
    window = getattr(text, "sliding_window", None)  # families without windows have no such field
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
