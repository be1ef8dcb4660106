"""Tokenizers and configurations of Hugging Face folders and GGUF files, without torch.

Configurations have no dropout; tokenizers pad on the left.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from strop.config.memory.facts import attribute_of, read_model_facts
from strop.config.names import is_installed
from strop.config.paths import gguf_files, reason_no_model, weight_map
from strop.errors import ConfigError, MissingExtraError, ModelError, did_you_mean, raised_as
from strop.files import read_json
from strop.manifest import require_below


def import_external_lib(names: str | list[str] | None) -> None:
    """Import packages that register a user's models or tokenizers with transformers."""
    for name in [names] if isinstance(names, str) else names or []:
        with raised_as(ModelError, f"model.external_lib: cannot import {name!r}", ImportError):
            importlib.import_module(name)


def locate(path: str | Path) -> dict[str, Any]:
    """Return the ``from_pretrained`` arguments of a folder, a folder with one GGUF file, or that file.

    ``strop.data.hub`` turns names on the hub into folders. Raises ``ModelError`` if there is nothing to load,
    ``MissingExtraError`` if a GGUF file needs packages that are not installed.
    """
    path = Path(path)
    if reason := reason_no_model("model.path", path):
        raise ModelError(reason)
    if (path / "config.json").is_file():
        for index in path.glob("*.index.json"):  # transformers joins what any of them names
            for file in {*weight_map(index).values()}:
                require_below(file, str(index), ModelError)
        return {"pretrained_model_name_or_path": str(path)}
    (file,) = gguf_files(path)
    for package in ("gguf", "accelerate"):  # transformers reads GGUF with both
        if not is_installed(package):
            raise MissingExtraError(package, "gguf", f"the GGUF model {file.name}")
    return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}


def words_of(tokenizer: Any, models: Iterable[str] = ()) -> int:
    """Return the number of words that a tokenizer makes, one more than its largest id, and ``models`` have.

    Text-only models have no rows for the placeholders of pictures that their families' tokenizers have.
    """
    facts = (read_model_facts(path) for path in models)
    sizes = (found.vocabulary for found in facts if found is not None)
    return min(1 + max(tokenizer.get_vocab().values()), *sizes, sys.maxsize)


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load a tokenizer that pads on the left.

    The end token pads where there is no pad token: masks are made from lengths, never from ids.
    """
    alone = Path(path) / "tokenizer_config.json"
    located = {"pretrained_model_name_or_path": str(path)} if alone.is_file() else locate(path)
    # AutoTokenizer would pick the class of the model type (for Qwen2 with another pre-tokenizer).
    kind: Any = PreTrainedTokenizerFast if _is_only_its_file(Path(path)) else AutoTokenizer
    # With the package mistral_common, which vLLM brings, it would be a tokenizer without a chat template.
    options = {"mistral_format": False} if kind is AutoTokenizer else {}
    with raised_as(ModelError, f"no tokenizer can be loaded from {path}"):
        tokenizer = kind.from_pretrained(**located, **options, trust_remote_code=trust_remote_code)
    _require_vocabulary(tokenizer, path)
    of_processor = Path(path) / "chat_template.json"  # where older models with pictures have it
    if tokenizer.chat_template is None and of_processor.is_file():
        with raised_as(ModelError, f"{of_processor}: no chat template can be read"):
            tokenizer.chat_template = json.loads(of_processor.read_text(encoding="utf-8"))["chat_template"]
    # prompts end at one column, where the generation of all rows begins
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise ModelError(f"the tokenizer in {path} has neither a pad token nor an end-of-sequence token")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _require_vocabulary(tokenizer: Any, path: str | Path) -> None:
    """Raise ``ModelError`` for the empty tokenizer that transformers makes of a folder without its files."""
    special = set(tokenizer.all_special_ids)
    if len(tokenizer) > len(special):
        return
    has_files = any(Path(path).glob("tokenizer*"))
    found = f"a tokenizer with no more than {sorted(tokenizer.all_special_tokens)}" if has_files else "none"
    raise ModelError(
        f"model path {path}: expected tokenizer files (tokenizer.json, with tokenizer_config.json), found "
        f"{found}; copy the model's files there, or set data.tokenizer to a folder that has them"
    )


def _is_only_its_file(folder: Path) -> bool:
    """Return True if ``tokenizer.json`` alone defines the folder's tokenizer, and no model-specific class."""
    settings = folder / "tokenizer_config.json"
    if not settings.is_file() or not (folder / "tokenizer.json").is_file():
        return False
    return read_json(settings).get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast")


_FURTHER_SIZES = ("num_key_value_heads", "intermediate_size", "head_dim")


def read_config(path: str | Path, trust_remote_code: bool) -> PretrainedConfig:
    with raised_as(ModelError, f"model {path}: its configuration cannot be read"):
        config = AutoConfig.from_pretrained(**locate(path), trust_remote_code=trust_remote_code)
    _require_sizes(config, path)
    _generation_of(Path(path))
    return config


def _generation_of(folder: Path) -> dict[str, Any] | None:
    """Return the content of ``generation_config.json``, without which transformers would load the model."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return None
    with raised_as(ModelError, f"{file} cannot be read"):
        return {**json.loads(file.read_bytes())}


def _require_sizes(config: PretrainedConfig, path: str | Path) -> None:
    """Raise ``ModelError`` for sizes that no model has, and for heads and layers that are not named.

    Transformers would take the defaults of the family. Configurations with parts leave them out on purpose.
    """
    text, file = config.get_text_config(decoder=True), Path(path) / "config.json"
    written = json.loads(file.read_bytes()) if text is config and file.is_file() else None
    for name in ("num_attention_heads", "num_hidden_layers", "hidden_size", "vocab_size", *_FURTHER_SIZES):
        value = attribute_of(text, name)
        names = {name, text.attribute_map.get(name, name)}
        if written is not None and name.startswith("num_") and name not in _FURTHER_SIZES:
            is_computed = isinstance(getattr(type(text), name, None), property)
            if hasattr(text, name) and not is_computed and all(written.get(key) is None for key in names):
                raise ModelError(f"model {path}: its config.json names no {' or '.join(sorted(names))}")
        if isinstance(value, int | float | str) and not (isinstance(value, int) and value > 0):
            raise ModelError(
                f"model {path}: {name}={value!r} in its config.json; expected a positive integer"
            )


OLD_ROPE = {"rope_scaling", "rope_theta", "partial_rotary_factor"}
"""Keys of ``config.json`` that are one in transformers 5: ``rope_parameters``."""


def load_model_config(
    path: str | Path, *, override_config: Mapping[str, Any] | None = None, trust_remote_code: bool = False
) -> PretrainedConfig:
    """Load the model's configuration with every dropout at 0, then apply ``override_config``.

    Configurations inside it, such as ``text_config``, have their dropouts at 0 as well, and an override of
    one of them is laid over its values.
    """
    config = read_config(path, trust_remote_code)
    for part in config_parts(config):
        for key, value in list(part.to_dict().items()):
            if is_dropout(key, value):
                setattr(part, key, 0.0)
    _override(config, override_config or {}, f"{path}", "override_config", trust_remote_code)
    return config


def _override(
    config: PretrainedConfig, values: Mapping[str, Any], path: str, where: str, trust_remote_code: bool
) -> None:
    """Lay ``values`` over a configuration, and over those inside it; ``ModelError`` for unknown keys."""
    rope = getattr(config, "rope_parameters", None) or {}
    for name, value in values.items():
        now, key = getattr(config, name, None), f"{where}.{name}"
        if isinstance(now, PretrainedConfig) and isinstance(value, Mapping):
            _override(now, value, path, key, trust_remote_code)
            continue
        if not hasattr(config, name) and not trust_remote_code:  # a model's own code may read any key
            advice = did_you_mean(name, config.to_dict())
            if name in OLD_ROPE and rope:
                advice = f"; it is a part of {where}.rope_parameters, here {rope}"
            raise ModelError(
                f"{key}: the configuration of the model {path} ({type(config).__name__}) has no such key, so "
                f"it would have no effect{advice}"
            )
        is_rope = name in ("rope_parameters", "rope_scaling") and isinstance(value, Mapping)
        if is_rope and not any(isinstance(part, Mapping) for part in value.values()):
            wanted = ("rope_theta", "partial_rotary_factor")
            if missing := {one: rope[one] for one in wanted if one in rope and one not in value}:
                raise ModelError(
                    f"{key}={value}: it takes the place of {rope}; add {missing}, or other values"
                )
        with raised_as(ModelError, f"{key}={value!r}: {path} does not take it"):
            setattr(config, name, value)


def generation_config_of(
    folder: Path, override_config: Mapping[str, Any] | None = None
) -> GenerationConfig | None:
    """Return the generation configuration of a model's folder; None for a GGUF file.

    Without ``generation_config.json`` it is made from ``config.json``, to which ``override_config`` applies.
    Raises ``ModelError`` if it cannot be read.
    """
    file = folder / "config.json"
    with raised_as(ModelError, f"model {folder}: its generation configuration cannot be read"):
        if (written := _generation_of(folder)) is not None:
            return GenerationConfig.from_dict(written)
        if not file.is_file():
            return None
        # as from_pretrained does: the end tokens of text_config count where the whole names none
        return GenerationConfig.from_model_config(json.loads(file.read_bytes()) | {**(override_config or {})})


def end_token_ids(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return every id that ends a response: the tokenizer's and those of the generation configuration."""
    declared = generation.eos_token_id if generation is not None else None
    ids = {tokenizer.eos_token_id, *(declared if isinstance(declared, list) else [declared])}
    return sorted(token_id for token_id in ids if token_id is not None)


def generation_problem(folder: Path) -> str:
    """Return why transformers refuses to save the generation configuration of a model's folder; else ""."""
    try:
        if (found := generation_config_of(folder)) is not None:
            found.validate(strict=True)
    except (ModelError, ValueError) as error:
        problem = error.__cause__ if isinstance(error, ModelError) else error
        if isinstance(problem, json.JSONDecodeError) or not isinstance(problem, ValueError):
            return ""  # loading the model reports it
        text = " ".join(str(problem).split())
        return text if len(text) <= 300 else f"{text[:300]} ..."
    return ""


def config_parts(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """Yield a configuration and the configurations inside it, such as ``text_config``."""
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PretrainedConfig):
            yield from config_parts(part)


def is_dropout(key: str, value: Any) -> bool:
    """Return True for an entry of a configuration that is a probability of dropout."""
    return isinstance(value, float) and ("dropout" in key or key.endswith("drop"))


def score_cap(config: PretrainedConfig) -> float | None:
    """Return the soft cap of attention scores (Gemma 2, VaultGemma), or None."""
    caps = (getattr(part, "attn_logit_softcapping", None) for part in config_parts(config))
    return next((cap for cap in caps if cap), None)


def attention_for(
    config: PretrainedConfig, requested: str | None, *, key: str = "model.attn_implementation"
) -> str | None:
    """Return the attention back-end to load a model with; None: transformers' choice.

    transformers prefers ``sdpa`` and ignores that it has no soft cap; a model with one gets ``eager``.
    Families with attention sinks support no ``sdpa``, so transformers' choice is right for them.

    Raises ``ConfigError``, which names ``key``, if ``sdpa`` is requested for a model with a soft cap.
    """
    cap = score_cap(config)
    if cap is None:
        return requested
    if requested == "sdpa":
        raise ConfigError(
            f"{key}=sdpa: this {config.model_type} model caps its attention scores "
            f"(attn_logit_softcapping={cap}), and sdpa does not; set {key} to null or eager, or on a GPU to "
            "flash_attention_2"
        )
    return requested or "eager"
