"""Forward passes without padding: the real tokens of a micro-batch in one row.

Every layer but attention treats tokens independently and runs on the packed row unchanged. Attention is
variable-length (``strop.models.attention``): flash-attention's kernel of torch or of flash-attn,
FlexAttention with a mask by blocks, or ``sdpa`` or ``eager`` per sequence, so that no memory grows with the
square of the packed length.
``check_packable`` (by configuration) and ``check_packed_pass`` (by a comparison with a padded pass) refuse
model families for which this is wrong.

Shapes: B padded rows of L columns, N real tokens, n tokens of this rank's piece, H hidden.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from strop import ranks
from strop.errors import ModelError
from strop.models.attention import Sequences, is_flash, packed_attention, portable_attention, row_attention
from strop.models.flex_attention import FLEX, Pieces
from strop.models.heads import require_numbers
from strop.models.inputs import PassInputs, Reader
from strop.models.passes.micro_batch import on_cpu, places_of, send
from strop.models.transformers_private import attention_name, takes_any_attention
from strop.models.ulysses import SequenceGroup, SharedRow
from strop.protocol import sequence_columns

_WINDOW = 2
"""Sliding window in a check: shorter than the check's sequences."""


class PackingError(ModelError):
    """Packed passes of a model are wrong or impossible."""


class Packing:
    """Places of the real tokens of padded rows in one packed row, or in the pieces of a ``group``."""

    def __init__(
        self, attention_mask_BL: Tensor, device: torch.device, group: SequenceGroup | None = None
    ) -> None:
        """Lay out the row of a mask on the CPU, for columns on ``device``."""
        self._mask_BL = self.computed_BL = attention_mask_BL.bool()
        self._device = device
        lengths = self._mask_BL.sum(dim=1).tolist()
        # rows without tokens fill micro-batches up; flash-attention takes no sequence of length 0
        self._lengths = [length for length in lengths if length]
        self.group = group

    def pack(self, values_BL: Tensor) -> Tensor:
        """Return the computed columns [1, N], row after row; with a group, this rank's piece."""
        row_N = values_BL.flatten().index_select(0, self._computed_N)
        return (row_N if self.group is None else self.group.piece(row_N))[None]

    def places(self, chosen_BL: Tensor) -> Tensor:
        """Return the places in the packed row of the ``chosen_BL`` tokens, none of which may be padding.

        ``chosen_BL`` is on the CPU. With a group: the places within their pieces.
        """
        places = self._place_BL[chosen_BL]
        if self.group is not None:
            places = places % self.group.piece_length(sum(self._lengths))
        return send(places, self._device)

    @cached_property
    def _computed_N(self) -> Tensor:  # noqa: N802 - a tensor
        return places_of(self.computed_BL, self._device)

    @property
    def own_BL(self) -> Tensor:  # noqa: N802 - a tensor
        """Real tokens that this rank holds, on the CPU."""
        if self.group is None:
            return self._mask_BL
        length = self.group.piece_length(sum(self._lengths))
        return self._mask_BL & (self._place_BL // length == self.group.rank)

    @property
    def _place_BL(self) -> Tensor:  # noqa: N802 - a tensor
        # a real token's place: the number of real tokens before it, rows joined
        return self._mask_BL.flatten().cumsum(0).view_as(self._mask_BL) - 1

    def options(self, implementation: str, seen_together: Tensor | None = None) -> dict[str, Any]:
        """Return the options that mark the ends of sequences for attention loaded as ``implementation``.

        ``PackingError`` if it does not take ``seen_together`` (``PassInputs``).
        """
        if seen_together is not None:
            raise PackingError(
                f"the tokens of a picture attend to each other, and {implementation} is causal"
            )
        options: dict[str, Any] = {}
        sequences = Sequences(self._lengths, self._device)
        if is_flash(implementation):
            options |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), sequences.ends)
            options |= dict.fromkeys(("max_length_q", "max_length_k"), sequences.longest)
        elif implementation == FLEX:
            options["pieces"] = self._pieces
        else:
            options["sequences"] = sequences
        if self.group is not None:
            row = SharedRow(self.group, sum(self._lengths), row_attention(implementation))
            options["shared_row"] = row
        return options

    @cached_property
    def _pieces(self) -> Pieces:
        rows_N = self._mask_BL.nonzero()[:, 0]
        places_N = (self._mask_BL.cumsum(dim=1) - 1)[self._mask_BL]
        # -1: no prompt of another sequence
        columns = (rows_N, torch.full_like(rows_N, -1), places_N)
        return Pieces(*(send(column, self._device) for column in columns))


def packed_hidden_states(model: PreTrainedModel, inputs: PassInputs, packing: Packing) -> Tensor:
    """Return the last hidden states [N, H] of the packed row, or [n, H] of this rank's piece.

    Runs one forward pass of the decoder without a cache.
    """
    options = packing.options(attention_name(model.config), inputs.seen_together)
    with packed_attention(model, packing.group):
        return inputs.packed(packing.pack).hidden_states(model, **options)[0]


def check_packable(model: PreTrainedModel) -> None:
    """Raise ``PackingError`` for attention that cannot be replaced or take lengths; needs no weights."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())  # families of one kind have no such field
    unknown = sorted(kinds - {"full_attention", "sliding_attention"})
    if unknown:
        reason = f"has layers of type {', '.join(unknown)}"
    elif model.config.is_encoder_decoder:
        reason = "has an encoder"
    elif not takes_any_attention(model):
        reason = "does not let its attention be replaced (transformers' AttentionInterface)"
    else:
        return
    raise PackingError(f"{type(model).__name__} {reason}")


@torch.no_grad()
def check_packed_pass(
    model: PreTrainedModel, group: SequenceGroup | None = None, *, sharded: bool = False
) -> None:
    """Raise ``PackingError`` if tokens of one sequence change another's hidden states; needs the weights.

    Compares three short sequences, packed and padded. It detects families that mix tokens outside attention,
    count positions themselves, or apply a sliding window in the mask only. The ranks of a ``group`` share the
    sequences. Collective if the model is ``sharded``.
    """
    # three lengths: padding and neighbours shift each sequence by another number of tokens
    mask_BL = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]], device=model.device)
    ids_BL = torch.arange(12, device=model.device).view(3, 4) % model.config.get_text_config().vocab_size
    batch = sequence_columns(ids_BL, mask_BL)
    with portable_attention(model), _short_windows(model):
        padded_NH = Reader().inputs(batch).hidden_states(model)[mask_BL.bool()]
        require_numbers(model, padded_NH)
        try:
            packed_NH = _whole_hidden_states(model, batch, Packing(mask_BL.cpu(), model.device, group))
        except (TypeError, ModelError) as error:  # a layer rejects the option or does not pass it on
            raise PackingError(f"{type(model).__name__}: {error}") from error
    # relative to the norm: families scale their hidden states differently
    difference = float((packed_NH - padded_NH).float().norm() / padded_NH.float().norm())
    if sharded:  # near the tolerance ranks differ, but all must run the same passes
        difference = ranks.largest(difference, model.device)
    tolerance = 1e-3 if padded_NH.dtype == torch.float32 else 5e-2
    # not >=: NaN is refused too
    if not difference < tolerance:
        raise PackingError(
            f"the hidden states of {type(model).__name__} change by {difference:.1e} (of their norm) when "
            f"sequences are packed, expected less than {tolerance:.0e}"
        )


def _whole_hidden_states(model: PreTrainedModel, batch: Mapping[str, Tensor], packing: Packing) -> Tensor:
    """Return the hidden states [N, H] of the packed row on every rank of a group."""
    hidden_nH = packed_hidden_states(model, Reader().inputs(batch), packing)
    if packing.group is None:
        return hidden_nH
    own_BL = packing.own_BL
    own_N = own_BL[on_cpu(batch, "attention_mask").bool()]
    hidden_NH = hidden_nH.new_zeros(len(own_N), hidden_nH.shape[1])
    hidden_NH[own_N] = hidden_nH[packing.places(own_BL)]
    return packing.group.sum_of_parts(hidden_NH)


@contextmanager
def _short_windows(model: PreTrainedModel) -> Generator[None]:
    """Set sliding windows to ``_WINDOW`` tokens in the body, in the configuration and in all layers.

    Masks are made from the configuration; layers pass theirs to attention.
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
