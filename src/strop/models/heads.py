"""Parts of Hugging Face models: the decoder of a language model, and a scalar head on a decoder.

transformers has sequence-classification classes for some families only. ``scorer_config`` registers the
others, defined as transformers defines its own (``GenericForSequenceClassification``): the family's decoder
under its name in the language model, and a linear layer ``score`` without bias.

Shapes: B rows of L tokens, H hidden.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.modeling_layers import GenericForSequenceClassification

from strop.errors import ModelError, StropError
from strop.models.attention import portable_attention


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Return the part of a model that maps tokens to hidden states.

    It is ``base_model``, except in families without an attribute of that name (Llama 4).
    """
    if model.base_model is not model:
        return model.base_model
    return next((part for part in model.children() if isinstance(part, PreTrainedModel)), model)


def reason_unsupported(config: PretrainedConfig) -> str | None:
    """Return the reason why no model of this configuration can be used in any role, or None."""
    if config.is_encoder_decoder:
        return (
            f"{config.model_type} is an encoder-decoder model; expected a decoder alone, which continues one "
            "sequence of tokens"
        )
    if config.model_type == "falcon" and getattr(config, "alibi", False):
        return (
            "Falcon with alibi=True is not supported: transformers' eager attention adds the position biases "
            "twice and its sdpa once, so passes, samplers and exports would not be of one model; expected a "
            "Falcon model with rotary positions"
        )
    if config.model_type == "reformer":
        return "reformer is not supported: it trains on sequences of one fixed length, in random hash buckets"
    return None


_ENCODERS = frozenset({"vision_tower", "visual", "vision_model", "vision_encoder", "image_tower"})
"""Names of an encoder in transformers (``PreTrainedModel.get_encoder``)."""
_PROJECTORS = ("merger", "connector", "projector")
"""Parts of the names of modules between encoder and language model."""


def reads_pictures(config: PretrainedConfig) -> bool:
    """Return True for a family with an encoder of pictures.

    Not for Llama 4, which has no part that makes hidden states of both: its language model is used alone.
    """
    known = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and "vision_config" in config.sub_configs
    return known and config.model_type != "llama4"


def part_of(name: str) -> Literal["encoder", "projector"] | None:
    """Return the part of a model with pictures that a weight belongs to; None: the language model."""
    path = name.split(".")
    if any(mark in module for module in path for mark in _PROJECTORS):
        return "projector"
    return "encoder" if _ENCODERS.intersection(path) else None


def encoder_modules(model: PreTrainedModel) -> str | None:
    """Return a regular expression of the names of modules of encoder and projector; None without any."""
    names = {name.partition(".")[0] for name, _ in model.base_model.named_parameters() if part_of(name)}
    if not names:
        return None
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    return "|".join(rf"{re.escape(prefix + name)}\..*" for name in sorted(names))


def policy_class(config: PretrainedConfig) -> Any:
    """Return transformers' class of a policy: of the whole model in a family with pictures."""
    return AutoModelForImageTextToText if reads_pictures(config) else AutoModelForCausalLM


def scorer_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration with which ``AutoModelForSequenceClassification`` builds this family.

    Registers a class if transformers has none. A model that reads pictures is built whole; of another
    configuration with several parts the result is the part of the language model.
    """
    known = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if type(config) in known or not (reads_pictures(config) or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING):
        return config
    with torch.device("meta"):
        language_model = policy_class(config).from_config(config)
    config, decoder = language_model.config, decoder_of(language_model)
    if type(config) not in known:
        # exist_ok: without it transformers silently ignores classes for its built-in configurations.
        if type(config) not in MODEL_MAPPING:
            AutoModel.register(type(config), type(decoder), exist_ok=True)
        scorer = _scorer_class(language_model, decoder)
        AutoModelForSequenceClassification.register(type(config), scorer, exist_ok=True)
    return config


def _scorer_class(language_model: PreTrainedModel, decoder: nn.Module) -> type[PreTrainedModel]:
    """Return a class whose weights have the names that they have in the language model, and ``score``.

    Its ``key_mapping`` is the argument of ``from_pretrained`` for files that name them otherwise.
    """
    name = type(language_model).__name__
    # the family's PreTrainedModel, which initializes weights and names what is not split
    family = next(base for base in type(language_model).__mro__[1:] if issubclass(base, PreTrainedModel))
    prefix = next(path for path, part in language_model.named_modules() if part is decoder)
    name = f"{name.partition('For')[0].removesuffix('LMHeadModel')}ForSequenceClassification"
    # transformers reads the file of the class's module to find out which attention and experts it supports.
    outer = language_model.base_model_prefix  # of the language model, in the files of one with images
    renamed = {} if outer == prefix else {rf"^{outer}\.": ""}
    # transformers looks them up by the class's name
    for step in get_checkpoint_conversion_mapping(type(language_model).__name__) or ():
        renamed |= dict(zip(step.source_patterns, step.target_patterns, strict=True))
    entries = {
        "key_mapping": renamed,
        "__module__": type(language_model).__module__,
        "base_model_prefix": prefix,
        "config_class": type(language_model.config),
    }
    return type(name, (GenericForSequenceClassification, family), entries)


@contextmanager
def model_errors(model: PreTrainedModel, prefix: str = "") -> Generator[None]:
    """Raise ``ModelError`` for any exception of the family's code in the body, where passes are tried out.

    A lack of memory is not the model's.
    """
    try:
        yield
    except (StropError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ModelError(
            f"{prefix}{type(model).__name__} fails in a trial pass over a few tokens, with "
            f"{type(error).__name__}: {error}; this family or its configuration is not supported"
        ) from error


def require_numbers(model: PreTrainedModel, outputs: Tensor) -> None:
    """Raise ``ModelError`` for NaN in ``outputs`` for ordinary tokens: no comparison would name the cause."""
    if outputs.isnan().any():
        raise ModelError(
            f"model {model.name_or_path}: {type(model).__name__} computes NaN for a few tokens; its weights "
            f"are damaged, or too large for {model.dtype}"
        )


@torch.no_grad()
def check_causal(model: PreTrainedModel) -> None:
    """Raise ``ModelError`` if hidden states depend on tokens that come later; needs the weights."""
    vocabulary = model.config.get_text_config().vocab_size
    ids_BL = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4]], device=model.device) % vocabulary
    with portable_attention(model):
        hidden_BLH = decoder_of(model)(input_ids=ids_BL, use_cache=False).last_hidden_state
    first_BLH = hidden_BLH[:, :3].float()
    require_numbers(model, first_BLH)
    difference = float((first_BLH[0] - first_BLH[1]).norm() / first_BLH.norm())
    if not difference < 0.01:  # rounding gives at most 0.001, in 16 bits
        raise ModelError(
            f"{type(model).__name__} is no causal model: a token changes the hidden states of the tokens "
            f"before it by {difference:.1e} of their norm, so it gives no probabilities of next tokens and "
            "no values of states. If its configuration has is_decoder or causal, set it to True by "
            "model.override_config"
        )


# Keys of configurations. A family with another is refused by check_projection.
_SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Gemma 2 to 4; RecurrentGemma; xLSTM."""
_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
"""Cohere; Falcon-H1; Muse Glimmer."""
_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
"""Granite; Inkling."""
_MULTIPLIES = ("hyperclovax",)
"""Families that multiply by what others divide by."""


def _first(config: PretrainedConfig, keys: tuple[str, ...], default: Any) -> Any:
    """Return the first of these entries of the text model's configuration that is set."""
    found = (getattr(config.get_text_config(), key, None) for key in keys)
    return next((value for value in found if value is not None), default)


def projection_of(config: PretrainedConfig) -> tuple[float, float | None]:
    """Return the scale of a family's logits, and the soft cap after it."""
    divisor = _first(config, _DIVISORS, 1.0)
    if config.get_text_config().model_type in _MULTIPLIES:
        divisor = 1 / divisor
    scale = _first(config, _MULTIPLIERS, 1.0) / divisor
    return scale, _first(config, _SOFT_CAPS, None)
