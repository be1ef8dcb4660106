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
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from strop.errors import ModelError
from strop.models.ulysses import SHARED_ATTENTION, SequenceGroup, SharedRow

if TYPE_CHECKING:
    from strop.models.prompts_once import WholeSequences

Runs = tuple[tuple[int, int], ...]
"""(S, K) of each run: so many neighbouring sequences of the same length."""

_FLOAT32_UP_TO = 512
"""Tokens of a sequence. Torch's bfloat16 attention on a CPU takes longer than float32 with its casts: forward
and backward 3.0 times as long with 96 tokens, 1.8 to 2.3 with 128, 1.2 with 256, and as long with 512."""
_PACKED = "strop_packed"  # transformers makes no mask for a back-end that it does not know


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequence_runs: Runs | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    whole_sequences: WholeSequences | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Query [1, Q, N, D], key and value [1, G, N, D] -> [1, N, Q, D]; each sequence sees itself alone.

    One call of transformers' own ``sdpa`` for each run, so that grouped heads, scaling and whatever else a
    family passes in ``options`` mean what they mean in its padded pass.
    """
    if whole_sequences is not None and position_bias is None:
        return whole_sequences.attend(module, query, key, value, sliding_window, **options), None
    if sequence_runs is None or position_bias is not None:
        raise ModelError(
            f"{type(module).__name__} does not hand the lengths of packed sequences to attention"
        )
    # split, not slices: each slice's backward pass would make a gradient of full size
    sizes = [sequences * length for sequences, length in sequence_runs]
    parts = zip(*(heads.transpose(1, 2)[0].split(sizes) for heads in (query, key, value)), strict=True)
    outputs = []
    for (sequences, length), tokens in zip(sequence_runs, parts, strict=True):
        heads = [part.unflatten(0, (sequences, length)).transpose(1, 2) for part in tokens]
        mask_KK = _window_mask(length, sliding_window, query.device)
        outputs.append(attend(module, *heads, mask_KK, **options).flatten(0, 1))
    return torch.cat(outputs)[None], None


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> Tensor:
    """The ``sdpa`` of transformers: query [S, Q, T, D], key and value [S, G, K, D] -> [S, T, Q, D].

    ``mask`` [1, 1, T, K] is of what each query sees; None: the keys up to its own.
    """
    heads = [query, key, value]
    with _in_float32(query.device, key.shape[2]) as cast:
        if cast:
            heads = [states.float() for states in heads]
        output, _ = sdpa_attention_forward(module, *heads, attention_mask=mask, **options)
    return output.to(value.dtype)


@contextmanager
def _in_float32(device: torch.device, length: int) -> Generator[bool]:
    """Whether to attend to sequences of that length in float32 whatever comes; autocast is off then."""
    if device.type != "cpu" or length > _FLOAT32_UP_TO:
        yield False
        return
    with torch.autocast("cpu", enabled=False):
        yield True


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """[1, 1, K, K] of what each token sees, itself and ``window - 1`` before it; None: all before it."""
    if window is None or length <= window:
        return None
    place_K = torch.arange(length, device=device)
    distance_KK = place_K[:, None] - place_K
    return ((distance_KK >= 0) & (distance_KK < window))[None, None]


AttentionInterface.register(_PACKED, _packed_attention)


@contextmanager
def packed_attention(model: PreTrainedModel, group: SequenceGroup | None = None) -> Generator[None]:
    """Attention by sequence in place of ``sdpa``; flash-attention stays, and takes the lengths itself.

    With a ``group`` either is called on whole rows, of which the model has a piece. Not for good: a rollout
    generates with the same model, from padded prompts and with a cache.
    """
    config = model.config
    before = config._attn_implementation
    config._attn_implementation = _row_attention(before) if group is None else SHARED_ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before


def _row_attention(implementation: str) -> str:
    """The back-end that attends to a packed row, for a model that was loaded with ``implementation``."""
    return implementation if is_flash(implementation) else _PACKED


@contextmanager
def portable_attention(model: PreTrainedModel) -> Generator[None]:
    """``sdpa`` in place of flash-attention, which runs neither on a CPU nor in float32, for checks."""
    config = model.config
    before = config._attn_implementation
    if is_flash(before):
        config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        config._attn_implementation = before


def is_flash(implementation: str | None) -> bool:
    """Whether attention is flash-attention's, which takes the lengths of sequences itself."""
    return implementation is not None and implementation.startswith("flash_attention")


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
