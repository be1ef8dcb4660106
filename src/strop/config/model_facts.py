"""What a model folder tells without loading the model: the size from the weights' headers, and the shape."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.config.paths import expand, is_url

_MOST_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a decoder-only transformer."""

    parameters: int
    counted: bool
    """From the weights themselves; False: worked out from the shape in config.json."""
    layers: int
    hidden: int
    vocabulary: int
    heads: int
    """Query heads."""
    kv_width: int
    """Key-value heads x head size: a token's cache holds 2 x layers x kv_width numbers."""
    context: int | None
    """The longest sequence that it was made for."""


def read_model_facts(path: str) -> ModelFacts | None:
    """Facts about the model in the folder `path`; None when it is not local or its config.json lacks them."""
    folder = Path(expand(path))
    if is_url(path) or not (folder / "config.json").is_file():
        return None
    try:
        config = json.loads((folder / "config.json").read_text())
        shape = config.get("text_config", config)
        counted = sum(count_parameters(file) for file in sorted(folder.glob("*.safetensors")))
        heads = shape["num_attention_heads"]
        head_size = shape.get("head_dim") or shape["hidden_size"] // heads
        return ModelFacts(
            parameters=counted or _estimate(shape, heads * head_size),
            counted=counted > 0,
            layers=shape["num_hidden_layers"],
            hidden=shape["hidden_size"],
            vocabulary=shape["vocab_size"],
            heads=heads,
            kv_width=shape.get("num_key_value_heads", heads) * head_size,
            context=shape.get("max_position_embeddings"),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return None  # a forecast only: loading the model is where a broken folder is reported


def count_parameters(file: Path) -> int:
    """The numbers in a safetensors file, by its header: 8 bytes of length, then JSON with the shapes."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > _MOST_HEADER_BYTES:
            raise ValueError(f"{file}: not a safetensors file")
        header = json.loads(stream.read(length))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def _estimate(shape: dict[str, Any], query_width: int) -> int:
    """Parameters of a Llama-shaped model: embeddings, attention, gated feed-forward, norms."""
    hidden, layers, vocabulary = shape["hidden_size"], shape["num_hidden_layers"], shape["vocab_size"]
    heads = shape["num_attention_heads"]
    kv_width = query_width // heads * shape.get("num_key_value_heads", heads)
    attention = hidden * (2 * query_width + 2 * kv_width)
    feed_forward = 3 * hidden * shape["intermediate_size"]
    embeddings = vocabulary * hidden * (1 if shape.get("tie_word_embeddings") else 2)
    return embeddings + layers * (attention + feed_forward + 2 * hidden) + hidden
