"""Bytes of a decoder-only transformer by its sizes, for the forecasts of all back-ends.

Weights, gradients and AdamW's two moments are float32. Activations follow Korthikanti et al.
(arXiv:2205.05198, section 4): about 34 bytes x tokens x hidden size a layer in 16 bits with an attention
kernel that keeps no score matrix, twice that in 32 bits; with checkpointing, the inputs of all layers and
one layer's activations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from strop.config.backends import total
from strop.config.memory.facts import ModelFacts, count_parameters, trained_whole
from strop.config.names import PIXELS_REMEMBERED
from strop.config.paths import ADAPTER_WEIGHTS, expand
from strop.config.placement import uses_gpu
from strop.config.schema import RootConfig
from strop.config.schema.model import ModelConfig

FLOAT32 = 4
MOMENTS = 2 * FLOAT32
TRAINED = 2 * FLOAT32 + MOMENTS  # weight, gradient and two moments
ACTIVATION_BYTES = {2: 34, 4: 68}  # for each token, layer and hidden unit, by the bytes of a number
_LOGITS_AT_ONCE = 1 << 25  # in one block of the vocabulary on a GPU; fewer on a CPU
_LOGIT_COPIES = 3


def weights(facts: ModelFacts | None, bytes_each: int, shards: int = 1) -> int | None:
    """Return the bytes of a part of a model's weights, of so many for each; None for an unknown number."""
    return facts.parameters * bytes_each // shards if facts is not None and facts.parameters else None


def trained(facts: ModelFacts | None, model: ModelConfig, shards: int) -> int | None:
    """Return the bytes of a rank's part of a model that is trained; of LoRA see ``_trained_numbers``.

    A module that is trained whole beside adapters is held twice, once as in the base model.
    """
    if not model.has_adapters or facts is None:
        return weights(facts, TRAINED, shards)
    return total(weights(facts, FLOAT32, shards), TRAINED * _trained_numbers(facts, model) // shards)


def whole_gradients(facts: ModelFacts | None, model: ModelConfig) -> int | None:
    """Return the bytes of unsharded float32 gradients; of LoRA see ``_trained_numbers``."""
    if not model.has_adapters or facts is None:
        return weights(facts, FLOAT32)
    return FLOAT32 * _trained_numbers(facts, model)


def _trained_numbers(facts: ModelFacts, model: ModelConfig) -> int:
    """Return the number of parameters of modules trained whole, and about that of adapters of all-linear."""
    folder = model.lora_adapter_path
    if folder is not None:
        file = Path(expand(folder)) / ADAPTER_WEIGHTS
        return count_parameters(file) if file.is_file() else 0
    whole: dict[str, int] = {}
    for end in model.modules_to_save:
        whole |= trained_whole(model.path, end) or {}
    # Widths in and out of the seven matrices of a layer; a feed-forward part is about four times as wide.
    return sum(whole.values()) + model.lora_rank * facts.layers * 25 * facts.hidden


def cast_weights(config: RootConfig, facts: ModelFacts | None, model: ModelConfig) -> int | None:
    """Return the bytes of the copies of its weights with which one rank computes in 16 bits."""
    on_gpu = model.compute_dtype == "auto" and uses_gpu(config)
    return weights(facts, 2) if model.compute_dtype == "bfloat16" or on_gpu else 0


def number_bytes(model: ModelConfig) -> int:
    """Return the bytes of an activation; the larger figure for `auto`, as the device is unknown here."""
    return 2 if model.compute_dtype == "bfloat16" else 4


def cache_bytes(facts: ModelFacts, number: int) -> int:
    """Return the bytes of a token's keys and values, of ``number`` bytes each."""
    return 2 * facts.layers * facts.kv_width * number


def activations(facts: ModelFacts | None, tokens: int, model: ModelConfig) -> int | None:
    """Return the bytes of the activations of a pass with gradients."""
    if facts is None:
        return None
    size, numbers = number_bytes(model), tokens * facts.hidden
    layer = numbers * ACTIVATION_BYTES[size]
    if model.enable_gradient_checkpointing is True:
        return numbers * size * facts.layers + layer
    return layer * facts.layers


class PictureBytes(NamedTuple):
    """Bytes of the pictures of data sets."""

    row: int
    """Processed pixels of the row that has most."""
    pixels: int
    """Processed pixels of all pictures."""
    files: int
    """Files that stand in memory."""

    @property
    def held(self) -> int:
        """Bytes that a process keeps."""
        return self.files + min(self.pixels, PIXELS_REMEMBERED)

    @classmethod
    def of_all(cls, sizes: Sequence[PictureBytes]) -> PictureBytes | None:
        """Return those of several data sets together; None without any."""
        rows = [each.row for each in sizes]
        return cls(max(rows), sum(e.pixels for e in sizes), sum(e.files for e in sizes)) if rows else None


def encoder(facts: ModelFacts | None, pixels: int, model: ModelConfig) -> int | None:
    """Return the bytes of ``pixels`` bytes of float32 and of their encoder's activations with gradients.

    An encoder that is frozen keeps none, and has one layer's at a time.
    """
    if facts is None or facts.encoder is None:
        return None if pixels else 0
    layers = 1 if "encoder" in model.freeze else facts.encoder.layers
    own = replace(facts, layers=layers, hidden=facts.encoder.hidden)
    return total(pixels, activations(own, pixels // FLOAT32 // facts.encoder.patch, model))


def logits(facts: ModelFacts | None, tokens: int) -> int | None:
    """Return the bytes of the logits that a pass over ``tokens`` holds at once."""
    if facts is None:
        return None
    return min(tokens * facts.vocabulary, _LOGITS_AT_ONCE) * FLOAT32 * _LOGIT_COPIES


def tokens_in(memory: int, facts: ModelFacts, model: ModelConfig, *, trains: bool, has_logits: bool) -> int:
    """Return the tokens of a pass that ``memory`` bytes hold: its activations, and logits where it has them.

    A pass without gradients holds the activations of one layer at a time.
    """
    one = activations(facts, 1, model) if trains else facts.hidden * ACTIVATION_BYTES[number_bytes(model)]
    block = logits(facts, _LOGITS_AT_ONCE) if has_logits else 0
    return max(memory - (block or 0), 0) // max(one or 0, 1)


def gib(size: int) -> str:
    """Return a size in GiB, in words."""
    return f"{size / 2**30:,.1f} GiB"


def listed(parts: Mapping[str, int]) -> str:
    """Return the parts of a sum in words, but for small ones."""
    return ", ".join(f"{name} {gib(size)}" for name, size in parts.items() if size >= 2**30 // 20)
