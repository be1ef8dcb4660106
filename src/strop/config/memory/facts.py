"""Sizes of a model, from its config.json and the headers of its weights, or from that of a GGUF file."""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open

from strop.config.paths import (
    SAFETENSORS_INDEX,
    expand,
    gguf_files,
    is_url,
    may_be_a_hub_name,
    safetensors_files,
)
from strop.files import read_json


class Encoder(NamedTuple):
    """Sizes of the part of a model that encodes pictures."""

    layers: int
    hidden: int
    patch: int
    """Numbers of pixels in a patch."""


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a decoder-only transformer."""

    parameters: int | None
    """Counted in the headers of the weights; None without safetensors files or a GGUF file."""
    layers: int
    hidden: int
    vocabulary: int
    heads: int
    """Query heads."""
    kv_heads: int
    kv_width: int
    """Key-value heads x head size: a token's cache holds 2 x layers x kv_width numbers."""
    context: int | None
    """Context window in tokens."""
    experts: int = 0
    """Routed experts of a layer."""
    expert_parameters: int = 0
    """Numbers in routed experts, out of ``parameters``."""
    encoder: Encoder | None = None
    """None for a model of text alone, or sizes that config.json does not have."""

    @property
    def head_size(self) -> int:
        """Dimension of an attention head."""
        return self.kv_width // self.kv_heads


def read_config_file(path: str) -> dict[str, Any]:
    """Return the content of config.json of the model in the folder `path`; none if it cannot be read."""
    return {} if is_url(path) else read_json(_folder_of(path) / "config.json")


def quantization_of(config: Mapping[str, Any]) -> str | None:
    """Return the method by which a model with this config.json is quantized; None if it is not."""
    found = config.get("quantization_config")
    return str(found.get("quant_method", "of an unnamed method")) if isinstance(found, Mapping) else None


def read_model_facts(path: str) -> ModelFacts | None:
    """Return facts about the model in the folder `path`; None if it is not local or lacks them."""
    if not path or is_url(path):
        return None
    folder = _folder_of(path)
    try:
        if not (folder / "config.json").is_file():
            (file,) = gguf_files(folder)
            return _gguf_facts(file, file.stat().st_mtime)
        files = [file for file in safetensors_files(folder) if file.is_file()]
        parameters = sum(count_parameters(file) for file in files) or None
        facts = facts_of(json.loads((folder / "config.json").read_bytes()), parameters)
        experts = sum(count_parameters(file, ".experts.") for file in files) if facts.experts else 0
        return replace(facts, expert_parameters=experts)
    except Exception:  # noqa: BLE001 - of any kind for a broken file, which loading the model reports
        return None


_POINTER = b"version https://git-lfs"


def fault_of_weights(path: str) -> str | None:
    """Return why the weights of a local model cannot be loaded: a download that is not whole; else None.

    Only headers are read, and only those of safetensors files.
    """
    folder = Path(expand(path))
    if not (folder / "config.json").is_file():
        return None
    files = safetensors_files(folder)
    any_kind = ("*.safetensors", "*.bin", "*.gguf", "*.h5", "*.msgpack", "*.pt*")
    if not files and not any(any(folder.glob(pattern)) for pattern in any_kind):
        return "there is config.json, and no weights (model.safetensors)"
    for file in files:
        if not file.is_file():
            return f"{file.name} is missing, which {SAFETENSORS_INDEX} names"
        try:
            count_parameters(file)
        except Exception as error:  # noqa: BLE001 - of the package, or of the system
            with file.open("rb") as content:
                if content.read(len(_POINTER)) == _POINTER:
                    return f"{file.name} is a pointer of git-lfs, without its content: run git lfs pull there"
            return f"{file.name} cannot be read: {error}; it may be a part of the file alone"
    return None


def trained_whole(path: str, end: str) -> dict[str, int] | None:
    """Return the weights of modules whose names end so, with their numbers; None if that is not known.

    Known are local safetensors files, but for models whose files have other names than their modules
    (experts). A file without an output layer has an embedding that is tied to it.
    """
    facts, sizes, files = read_model_facts(path), {}, safetensors_files(_folder_of(path))
    if facts is None or facts.experts or not files or not all(file.is_file() for file in files):
        return None
    for file in files:
        with safe_open(file, framework="numpy") as tensors:
            sizes |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    tied = "lm_head.weight" not in sizes
    found = {}
    for name, shape in sizes.items():
        is_embedding = shape == [facts.vocabulary, facts.hidden]
        names = [name, "lm_head.weight"] if tied and is_embedding else [name]
        if any(_is_in_module(each, end) for each in names):
            found[name] = math.prod(shape)
    return found


def _is_in_module(weight: str, end: str) -> bool:
    """Return True if the weight's module or one around it is called so; files may lack a common prefix."""
    words = weight.split(".")[:-1]
    modules = [".".join(words[:n]) for n in range(1, len(words) + 1)]
    return any(module.endswith(end) or end.endswith(f".{module}") for module in modules)


def _folder_of(path: str) -> Path:
    """Return the folder of a local model, or of one from the hub in the cache."""
    folder = Path(expand(path))
    if not (folder / "config.json").is_file() and may_be_a_hub_name(path):
        cached = try_to_load_from_cache(path, "config.json")
        folder = Path(cached).parent if isinstance(cached, str) else folder
    return folder


_GGUF_FORMS = "BbHhIif?__Qqd"
"""Formats of ``struct`` by the number of a type; 8 is a text, 9 a list."""
_GGUF_SIZES = (
    *("block_count", "embedding_length", "vocab_size", "attention.head_count", "attention.head_count_kv"),
    *("attention.key_length", "context_length", "expert_count"),
)
"""Keys in the order of ``SHAPE_KEYS``."""


@cache
def _gguf_facts(file: Path, changed: float) -> ModelFacts:
    """Return facts from the header of a file; the package that reads GGUF takes seconds for a vocabulary."""
    with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:

        def read(form: str) -> Any:
            return struct.unpack(f"<{form}", data.read(struct.calcsize(f"<{form}")))

        def value(kind: int) -> Any:
            if kind == 9:
                kind, count = read("IQ")
                return [value(kind) for _ in range(count)]
            return data.read(*read("Q")).decode() if kind == 8 else read(_GGUF_FORMS[kind])[0]

        _, _, tensors, keys = read("4sIQQ")
        values = {value(8): value(*read("I")) for _ in range(keys)}
        sizes = [(value(8), math.prod(read(f"{read('I')[0]}Q")), read("IQ")) for _ in range(tensors)]
    names = [f"{values['general.architecture']}.{name}" for name in _GGUF_SIZES]
    shape = dict(zip(SHAPE_KEYS, map(values.get, names), strict=False))
    shape["vocab_size"] = len(values["tokenizer.ggml.tokens"])
    return facts_of(shape, sum(size for _, size, _ in sizes))


SHAPE_KEYS = (
    *("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "max_position_embeddings", "num_experts", "num_local_experts"),
)
"""Keys of config.json that hold the sizes of a model."""


_LEFT_OUT: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    },
    "llama": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32_000,
    },
}
"""Defaults of transformers, by ``model_type``: published files of Gemma 3 and LLaVA leave sizes out."""


def facts_of(config: Mapping[str, Any], parameters: int | None) -> ModelFacts:
    """Return facts from the content of a config.json; ``KeyError`` and others if it lacks them."""
    shape = config.get("text_config", config)
    shape = {**_LEFT_OUT.get(shape.get("model_type", ""), {}), **shape}
    heads = shape["num_attention_heads"]
    kv_heads = shape.get("num_key_value_heads") or heads
    of_layers = [one.get("head_dim") for one in (shape.get("per_layer_config") or {}).values()]
    sizes = [*filter(None, (shape.get("head_dim"), shape.get("global_head_dim"), *of_layers))]
    head_size = max(sizes, default=shape["hidden_size"] // heads)
    return ModelFacts(
        parameters=parameters,
        layers=shape["num_hidden_layers"],
        hidden=shape["hidden_size"],
        vocabulary=shape["vocab_size"],
        heads=heads,
        kv_heads=kv_heads,
        kv_width=kv_heads * head_size,
        context=shape.get("max_position_embeddings"),
        experts=shape.get("num_experts") or shape.get("num_local_experts") or 0,
        encoder=_encoder(config.get("vision_config") or {}),
    )


def facts_of_loaded(config: Any, parameters: int | None = None) -> ModelFacts:
    """Return facts from a loaded configuration of transformers, but for its encoder of pictures."""
    shape = config.get_text_config()  # its attributes have one name in all families, unlike its keys
    return facts_of({name: attribute_of(shape, name) for name in SHAPE_KEYS}, parameters)


def attribute_of(config: Any, name: str) -> Any:
    """Return an attribute of a configuration of transformers, None without it.

    Of one that differs from layer to layer, as ``head_dim`` of Gemma 4, which cannot be read as a whole, it
    is the largest.
    """
    if name in (getattr(config, "per_layer_attributes", None) or ()):
        return max(getattr(layer, name) for layer in config.per_layer_config)
    return getattr(config, name, None)


def _encoder(shape: Mapping[str, Any]) -> Encoder | None:
    # Qwen2-VL's hidden_size is that of the language model
    layers = shape.get("depth") or shape.get("num_hidden_layers")
    hidden, side = shape.get("embed_dim") or shape.get("hidden_size"), shape.get("patch_size")
    if not (layers and hidden and side):
        return None
    width, height = side if isinstance(side, list) else (side, side)
    return Encoder(layers, hidden, 3 * width * height * (shape.get("temporal_patch_size") or 1))


def count_parameters(file: Path, part: str = "") -> int:
    """Count the numbers in a safetensors file, in tensors with ``part`` in the name, by its header."""
    with safe_open(file, framework="numpy") as tensors:
        names = [name for name in tensors.keys() if part in name]  # noqa: SIM118 - not a mapping
        return sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)
