"""Which models can be packed: by their configuration before weights are read, and by trying it after.

Shapes: B padded rows of L columns, N real tokens in all of them, n of one rank's piece, H hidden.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from strop.errors import ModelError
from strop.models.packing import Packing, is_flash, packed_hidden_states, portable_attention
from strop.models.ulysses import SequenceGroup

_WINDOW = 2
"""The sliding window of a check: shorter than its sequences, as real windows are shorter than real ones."""


def check_packable(model: PreTrainedModel, key: str) -> None:
    """``ModelError`` for attention that cannot be replaced or told where sequences end; needs no weights.

    ``key`` is the configuration's key that asked for packed passes.
    """
    config = model.config.get_text_config()
    implementation = model.config._attn_implementation
    kinds = set(getattr(config, "layer_types", None) or ())  # families of one kind have no such field
    unknown = sorted(kinds - {"full_attention", "sliding_attention"})
    if unknown:
        reason = f"has layers of type {', '.join(unknown)}"
    elif model.config.is_encoder_decoder:
        reason = "has an encoder"
    elif not (model._supports_attention_backend and model._can_set_attn_implementation()):
        reason = "does not let its attention be replaced (transformers' AttentionInterface)"
    elif implementation != "sdpa" and not is_flash(implementation):
        reason = f"attends with attn_implementation={implementation}, expected sdpa or flash_attention_2"
    else:
        return
    raise ModelError(f"{key}=True: {type(model).__name__} {reason}; set {key}=False")


@torch.no_grad()
def check_packed_pass(model: PreTrainedModel, key: str, group: SequenceGroup | None = None) -> None:
    """``ModelError`` when tokens of one sequence change another's hidden states; needs the weights.

    Three short sequences, packed and padded: a family that mixes tokens anywhere but in attention, counts
    positions by itself or keeps its sliding window to its mask would otherwise train on wrong numbers. The
    ranks of a ``group`` share the sequences.
    """
    mask_BL = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]], device=model.device)
    ids_BL = torch.arange(12, device=model.device).view(3, 4) % model.config.get_text_config().vocab_size
    batch = {
        "input_ids": ids_BL,
        "attention_mask": mask_BL,
        "position_ids": (mask_BL.cumsum(dim=1) - 1).clamp(min=0),
    }
    with portable_attention(model), _short_windows(model):
        padded_NH = model.base_model(**batch, use_cache=False).last_hidden_state[mask_BL.bool()]
        try:
            packed_NH = _whole_hidden_states(model, batch, Packing(mask_BL, group))
        except (TypeError, ModelError) as error:  # a layer that takes, or hands on, no such option
            raise ModelError(f"{key}=True: {type(model).__name__}: {error}; set {key}=False") from error
    difference = float((packed_NH - padded_NH).float().norm() / padded_NH.float().norm())
    tolerance = 1e-3 if padded_NH.dtype == torch.float32 else 5e-2
    if not difference < tolerance:
        raise ModelError(
            f"{key}=True: the hidden states of {type(model).__name__} change by {difference:.1e} (of their "
            f"norm) when sequences are packed, expected less than {tolerance:.0e}; set {key}=False"
        )


def _whole_hidden_states(model: PreTrainedModel, batch: Mapping[str, Tensor], packing: Packing) -> Tensor:
    """The hidden states [N, H] of the packed row, on every rank of a group."""
    hidden_nH = packed_hidden_states(model, batch, packing)
    if packing.group is None:
        return hidden_nH
    mask_BL, own_BL = batch["attention_mask"].bool(), packing.own_BL
    own_N = own_BL[mask_BL]
    hidden_NH = hidden_nH.new_zeros(len(own_N), hidden_nH.shape[1])
    hidden_NH[own_N] = hidden_nH[packing.places(own_BL)]
    return packing.group.sum_of_parts(hidden_NH)


@contextmanager
def _short_windows(model: PreTrainedModel) -> Generator[None]:
    """Sliding windows of ``_WINDOW`` tokens wherever the model has one: in the configuration, that masks are
    made by, and in its layers, that pass one to attention.
    """
    places: list[Any] = [model.config.get_text_config(), *model.modules()]
    before = [(place, getattr(place, "sliding_window", None)) for place in places]
    before = [(place, window) for place, window in before if isinstance(window, int) and window]
    try:
        for place, _ in before:
            place.sliding_window = _WINDOW
        yield
    finally:
        for place, window in before:
            place.sliding_window = window
