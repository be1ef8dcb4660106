"""Names of transformers without a public counterpart, read in 5.19; the rest of strop reaches into none.

``tests/test_private_names.py`` fails by name where transformers moves one, and where another file uses one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save


def attention_name(config: PreTrainedConfig) -> str:
    """Return the name of the language model's attention back-end in use."""
    return config.get_text_config()._attn_implementation


def set_attention_name(config: PreTrainedConfig, name: str) -> None:
    """Select the attention back-end of the language model; an encoder of pictures keeps its own.

    ``set_attention_implementation`` of the model loads kernels for some names, and refuses others.
    """
    config.get_text_config()._attn_implementation = name


def attention_is_replaceable(model: PreTrainedModel) -> bool:
    """Return True if the family's attention is called by the name of its back-end."""
    return model._can_set_attn_implementation()


def takes_any_attention(model: PreTrainedModel) -> bool:
    """Return True if the family's attention may be a function of ``AttentionInterface``."""
    return model._supports_attention_backend and attention_is_replaceable(model)


def supports_sdpa(model: PreTrainedModel) -> bool:
    """Return True if the family computes the same with ``sdpa``."""
    return model._supports_sdpa


def layer_classes(model: PreTrainedModel) -> set[str]:
    """Return the names of the classes of the model's layers; empty if it does not name them."""
    return set(model._no_split_modules or ())


def save_custom_code(model: PreTrainedModel, folder: Path) -> None:
    """Copy the files of a model's own code (``trust_remote_code``) to a folder, like ``save_pretrained``."""
    if model._auto_class is not None:
        config: Any = model.config  # its type is documented as a dict
        custom_object_save(model, folder, config=config)


def recorded_outputs(module: nn.Module) -> dict[str, Any]:
    """Return what the decoder can record of its modules, such as ``router_logits``; {} if nothing."""
    return getattr(module, "_can_record_outputs", None) or {}
