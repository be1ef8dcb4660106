"""Packed passes that compute a prompt once for all of its samples in a micro-batch.

In a causal model a response does not change the hidden states of its prompt, so samples share the prompt's
tokens in every layer, forward and backward: of 8 samples with prompts as long as responses, 7 tokens of 16
are saved. The last token of a response predicts nothing and is left out. Responses still attend to whole
sequences: to copies of the prompt's keys and values, whose gradients add up in float32, or with FlexAttention
to the prompt's own. The gradient equals that of padded passes. Flash-attention and shared sequences compute
every prompt again.

Shapes: B padded rows of L columns, P of them prompt; N tokens that are computed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import cached_property
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from strop.models.attention import WholeSequences
from strop.models.flex_attention import FLEX, Pieces
from strop.models.packing import Packing
from strop.models.passes.micro_batch import on_cpu, send
from strop.models.passes.shared_prompts import SharedPrompts

_REMEMBERED = 1 << 19
"""Tokens of the layouts that are remembered, padding included: 40 MB, of which 16 MB are on the device."""
_LAYOUTS = 128
"""Number of them: those of short rows, never used again, would fill the 40 MB over hundreds of steps."""
_recent: OrderedDict[tuple[bytes, tuple[int, ...], int, torch.device], PromptsOnce] = OrderedDict()
_one_thread = Lock()


def prompt_width(batch: Mapping[str, Tensor]) -> int:
    """Return P, the number of columns before the responses."""
    return batch["input_ids"].shape[1] - batch["response_mask"].shape[1]


def first_with_prompt(batch: Mapping[str, Tensor]) -> Tensor:
    """Return for each row [B] the first row with the same prompt, which may be the row itself; on the CPU."""
    width = prompt_width(batch)
    mask_BP = on_cpu(batch, "attention_mask")[:, :width].bool()
    # -1: a pad token may be a real token too (the end token, where there is no pad token)
    prompts_BP = on_cpu(batch, "input_ids")[:, :width].masked_fill(~mask_BP, -1)
    if "images" in batch:  # equal tokens are of other pictures
        prompts_BP = torch.cat([prompts_BP, on_cpu(batch, "images")], dim=1)
    if "images_at" in batch and batch["images_at"].shape[1] > batch["response_mask"].shape[1]:  # of leaves
        prompts_BP = torch.cat([prompts_BP, on_cpu(batch, "images_at")[:, :width]], dim=1)
    firsts: dict[bytes, int] = {}  # torch.unique(dim=0) takes ten times as long
    rows = enumerate(prompts_BP.numpy())
    return torch.tensor([firsts.setdefault(prompt.tobytes(), row) for row, prompt in rows])


class PromptsOnce(Packing):
    """One packed row with the prompt of each first sample, and the responses of all."""

    def __init__(self, mask_BL: Tensor, first_B: Tensor, width: int, device: torch.device) -> None:
        """Lay out the tokens of a mask on the CPU; P = ``width``, ``first_B`` from ``first_with_prompt``."""
        super().__init__(mask_BL, device)
        self._first_B, self._width = first_B, width
        repeats_B = first_B != torch.arange(len(first_B))
        self.computed_BL = mask_BL.clone()
        self.computed_BL[repeats_B, :width] = False
        self._shared_place_BL = self.computed_BL.flatten().cumsum(0).view_as(mask_BL) - 1
        # left padding: equal prompts stand in the same columns
        self._shared_place_BL[:, :width] = self._shared_place_BL[first_B, :width]
        samples_B = first_B.bincount(minlength=len(first_B))
        prompts = mask_BL[:, :width].sum(dim=1).tolist()
        self._starts = [
            # alone: one piece; first of several: prompt and response apart; later ones: the response
            [0] if samples == 1 else [0, prompt] if samples else [prompt]
            for prompt, samples in zip(prompts, samples_B.tolist(), strict=True)
        ]

    @classmethod
    def of(cls, batch: Mapping[str, Tensor], *, with_last: bool) -> PromptsOnce:
        """Return the layout of a micro-batch; with ``with_last`` the last token of each response is computed.

        Passes over the same samples share it, by policy, critic and reference and in all epochs, as long as
        their micro-batches are cut alike and there were fewer than ``_LAYOUTS`` since then, of fewer than
        ``_REMEMBERED`` tokens.
        """
        mask_BL, width = on_cpu(batch, "attention_mask").bool(), prompt_width(batch)
        if not with_last:
            follows_BL = mask_BL.flip(1).cumsum(1).flip(1) > 1
            mask_BL = torch.cat([mask_BL[:, :width], (mask_BL & follows_BL)[:, width:]], dim=1)
        firsts = tuple(first_with_prompt(batch).tolist())
        key = mask_BL.numpy().tobytes(), firsts, width, batch["input_ids"].device
        # groups of one process run in a thread per pool
        with _one_thread:
            layout = _recent.pop(key, None) or cls(mask_BL, torch.tensor(firsts), width, key[-1])
            _recent[key] = layout  # the newest are the last
            while len(_recent) > _LAYOUTS or (
                len(_recent) > 1 and sum(len(mask) for mask, *_ in _recent) > _REMEMBERED
            ):
                _recent.popitem(last=False)
        return layout

    @property
    def _place_BL(self) -> Tensor:  # noqa: N802 - a tensor
        return self._shared_place_BL

    def options(self, implementation: str, seen_together: Tensor | None = None) -> dict[str, Any]:
        """Return the option that gives attention the layout of whole sequences."""
        if implementation != FLEX:
            return {"whole_sequences": WholeSequences(self._shared_prompts, seen_together)}
        return super().options(FLEX, seen_together)

    @cached_property
    def _shared_prompts(self) -> SharedPrompts:
        layout = (self._mask_BL, self.computed_BL, self._shared_place_BL, self._starts)
        return SharedPrompts(*layout, device=self._device)

    @cached_property
    def _pieces(self) -> Pieces:
        rows_N, columns_N = self.computed_BL.nonzero(as_tuple=True)
        responds_N = columns_N >= self._width
        pieces_N = rows_N + responds_N * len(self._first_B)
        prompts_N = self._first_B[rows_N].masked_fill(~responds_N, -1)
        places_N = (self._mask_BL.cumsum(dim=1) - 1)[self.computed_BL]
        return Pieces(*(send(column, self._device) for column in (pieces_N, prompts_N, places_N)))
