"""Forward passes without padding: the real tokens of a micro-batch in one row, each sequence by itself.

Every layer but attention treats tokens one by one, so it runs on the packed row as it is. Attention is
variable-length: flash-attention's own where the model was loaded with it, and otherwise scaled dot-product
attention over one sequence after another, so that nothing grows with the square of the packed length.

Shapes: B padded rows of L columns, N real tokens in all of them, S sequences of one length K (a run),
Q query heads, G key-value heads, D head size, H hidden.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from strop.errors import ModelError
from strop.models.attention import (
    _PACKED,
    Runs,
    _packed_attention,
    _row_attention,
    is_flash,
    packed_attention,
    portable_attention,
)
from strop.models.ulysses import SequenceGroup, SharedRow

if TYPE_CHECKING:
    pass


"""(S, K) of each run: so many neighbouring sequences of the same length."""


"""Tokens of a sequence. Torch's bfloat16 attention on a CPU takes longer than float32 with its casts: forward
and backward 3.0 times as long with 96 tokens, 1.8 to 2.3 with 128, 1.2 with 256, and as long with 512."""


AttentionInterface.register(_PACKED, _packed_attention)


class Packing:
    """Where the real tokens of padded rows stand in one packed row, or in the pieces of a ``group``."""

    def __init__(self, attention_mask_BL: Tensor, group: SequenceGroup | None = None) -> None:
        self._mask_BL = attention_mask_BL.bool()
        lengths = self._mask_BL.sum(dim=1).tolist()
        self._lengths = [length for length in lengths if length]
        self.group = group

    def pack(self, values_BL: Tensor) -> Tensor:
        """[1, N]: the columns of the first row that are no padding, then those of the second, and so on.

        With a group, this rank's piece of it.
        """
        row_N = values_BL[self._mask_BL]
        return (row_N if self.group is None else self.group.piece(row_N))[None]

    def places(self, chosen_BL: Tensor) -> Tensor:
        """Where in the packed row the ``chosen_BL`` tokens are; none of them may be padding.

        With a group, where in the piece that each is in.
        """
        places = self._place_BL[chosen_BL]
        return places if self.group is None else places % self.group.piece_length(sum(self._lengths))

    @property
    def own_BL(self) -> Tensor:  # noqa: N802 - a tensor
        """The real tokens that this rank has."""
        if self.group is None:
            return self._mask_BL
        length = self.group.piece_length(sum(self._lengths))
        return self._mask_BL & (self._place_BL // length == self.group.rank)

    @property
    def _place_BL(self) -> Tensor:  # noqa: N802 - a tensor
        return self._mask_BL.flatten().cumsum(0).view_as(self._mask_BL) - 1

    @property
    def runs(self) -> Runs:
        """The sequences in their order, neighbours of equal length together."""
        return tuple((len(list(same)), length) for length, same in itertools.groupby(self._lengths))

    def options(self, implementation: str) -> dict[str, Any]:
        """How attention, loaded as ``implementation``, is told where sequences end and what ranks have."""
        ends = self._ends(implementation)
        if self.group is None:
            return ends
        row = SharedRow(self.group, sum(self._lengths), _row_attention(implementation))
        return {**ends, "shared_row": row}

    def _ends(self, implementation: str) -> dict[str, Any]:
        if not is_flash(implementation):
            return {"sequence_runs": self.runs}
        ends = list(itertools.accumulate(self._lengths, initial=0))
        ends_S = torch.tensor(ends, dtype=torch.int32, device=self._mask_BL.device)
        longest = max(self._lengths)
        return {
            "cu_seq_lens_q": ends_S,
            "cu_seq_lens_k": ends_S,
            "max_length_q": longest,
            "max_length_k": longest,
        }


def packed_hidden_states(model: PreTrainedModel, batch: Mapping[str, Tensor], packing: Packing) -> Tensor:
    """The last hidden states [N, H] of the packed row, or [n, H] of this rank's piece.

    One forward pass of the decoder without a cache.
    """
    options = packing.options(model.config._attn_implementation)
    with packed_attention(model, packing.group):
        return model.base_model(
            input_ids=packing.pack(batch["input_ids"]),
            attention_mask=None,
            position_ids=packing.pack(batch["position_ids"]),
            use_cache=False,
            **options,
        ).last_hidden_state[0]


# Which models can be packed: by their configuration before weights are read, and by trying it after.

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
