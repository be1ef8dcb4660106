"""Configuration and tokenizer of a model's folder, for the folders that are written from it.

Loading sets dropouts to 0, the dtype to float32 and a pad token; transformers writes configurations and
tokenizers with further entries. A written folder has the source's values and files instead.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from strop.config.paths import safetensors_files
from strop.files import take_usual_mode
from strop.models.folder import OLD_ROPE, config_parts, generation_config_of, is_dropout
from strop.models.transformers_private import save_custom_code

_GENERATION, _TOKENIZER = "generation_config.json", "tokenizer_config.json"
_OF_TORCH = {"format": "pt"}
_OF_TOKENIZERS = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template.*")
OF_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Source:
    """The configuration of a model as its folder has it."""

    folder: Path
    config: PretrainedConfig
    values: Mapping[str, Any]
    """Those of ``config.json``; empty for a GGUF file."""
    dtype: torch.dtype
    """As named by the configuration, else that of the first weight in safetensors, else float32."""

    @classmethod
    def read(cls, folder: Path, config: PretrainedConfig) -> Source:
        """Return the source with the ``config`` that was read from ``folder``, and that nothing changes."""
        file = folder / "config.json"
        values = json.loads(file.read_bytes()) if file.is_file() else {}
        named: Any = config.dtype or config.get_text_config().dtype
        return cls(folder, config, values, named or _dtype_of_weights(folder))

    def values_of(self, config: PretrainedConfig) -> dict[str, Any]:
        """Return the entries of ``config.json`` for ``config``: the source's, and those set on purpose."""
        found, theirs = copy.deepcopy(config), {type(part): part for part in config_parts(self.config)}
        for part in config_parts(found):
            before = theirs.get(type(part), self.config)
            part.dtype = before.dtype
            for key, value in before.to_dict().items():
                if is_dropout(key, value) and getattr(part, key, None) == 0.0:
                    setattr(part, key, value)
        if not self.values or type(found) is not type(self.config):
            return json.loads(found.to_json_string())
        now, before = (json.loads(part.to_json_string(use_diff=False)) for part in (found, self.config))
        kept = {key: value for key, value in self.values.items() if key in now or key not in before}
        if now.get("rope_parameters") != before.get("rope_parameters"):
            for name in OLD_ROPE - now.keys():  # older names, which transformers would take first
                kept.pop(name, None)
        return kept | {key: value for key, value in now.items() if key not in before or value != before[key]}


def _dtype_of_weights(folder: Path) -> torch.dtype:
    for file in safetensors_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a mapping
                if dtype := _DTYPES.get(tensors.get_slice(key).get_dtype()):
                    return dtype
    return torch.float32


def source_of(model: Any) -> Source:
    """Return the source of a model; of one that was not loaded from a folder, the model as it is."""
    return getattr(model, "strop_source", None) or Source(Path("-"), model.config, {}, model.dtype)


def write_config(folder: Path, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Write the configurations of a model whose weights will be in ``dtype``, and its code, if it has any."""
    source = source_of(model)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    save_custom_code(model, folder)
    set_dtype(folder, dtype, source.values_of(model.config))
    for name in OF_PROCESSORS:  # without them a model with pictures does not load
        if (source.folder / name).is_file():
            shutil.copyfile(source.folder / name, folder / name)
    if model.can_generate() and (source.folder / _GENERATION).is_file():
        shutil.copyfile(source.folder / _GENERATION, folder / _GENERATION)
    elif model.can_generate() and model.generation_config is not None:
        # that of the folder: override_config is of the run
        _write_generation(folder, generation_config_of(source.folder) or model.generation_config)


def _write_generation(folder: Path, generation: GenerationConfig) -> None:
    """Write a generation configuration as it is: ``save_pretrained`` refuses some that models come with."""
    generation.to_json_file(folder / _GENERATION, keys_to_pop=["compile_config"])


def save_tensors(tensors: dict[str, Tensor], file: Path, metadata: Mapping[str, str] = _OF_TORCH) -> None:
    """Write a safetensors file with the permissions of a new file."""
    save_file(tensors, file, metadata=dict(metadata))
    take_usual_mode(file)


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Write a model of a program as ``save_pretrained`` does, with any generation configuration."""
    own = getattr(model, "generation_config", None)
    generates = own is not None and model.can_generate()
    if generates:
        model.generation_config = type(own)()
    try:
        model.save_pretrained(folder)
    finally:
        if generates:
            model.generation_config = own
    for file in safetensors_files(folder):
        take_usual_mode(file)
    if generates:
        _write_generation(folder, own)


def dtype_of(folder: Path) -> torch.dtype:
    """Return the dtype that a folder's ``config.json`` names."""
    values = json.loads((folder / "config.json").read_bytes())
    return getattr(torch, values.get("dtype") or values.get("torch_dtype") or "float32")


def set_dtype(folder: Path, dtype: torch.dtype, values: dict[str, Any] | None = None) -> None:
    """Write ``values`` to a folder's ``config.json`` (None: those that it has), with this dtype."""
    values = values or json.loads((folder / "config.json").read_bytes())
    key = "torch_dtype" if "torch_dtype" in values else "dtype"  # of transformers before 4.56
    values[key] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def write_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a tokenizer's files: those of the folder that it was read from, as they are there."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise OSError(str(error)) from error  # of a write of the tokenizers package
    source = Path(tokenizer.name_or_path)
    if not tokenizer.name_or_path or not (source / _TOKENIZER).is_file():  # of a GGUF file, for example
        values = json.loads((folder / _TOKENIZER).read_bytes())
        kept = {key: value for key, value in values.items() if key not in ("is_local", "local_files_only")}
        (folder / _TOKENIZER).write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n")
        return
    names = [*tokenizer.vocab_files_names.values(), *_OF_TOKENIZERS]
    for path in {path for name in names for path in source.glob(name) if path.is_file()}:
        shutil.copyfile(path, folder / path.name)
    if not (source / "chat_template.jinja").is_file():
        (folder / "chat_template.jinja").unlink(missing_ok=True)  # it is in the copied tokenizer_config.json
