"""Packed passes that compute a prompt once for all of its samples in a micro-batch.

In a causal model a response does not change the hidden states of its prompt, so samples share the prompt's
tokens in every layer, forward and backward: of 8 samples with prompts as long as responses, 7 tokens of 16
are saved. The last token of a response predicts nothing and is left out. Responses still attend to whole
sequences: to copies of the prompt's keys and values, whose gradients add up. The gradient equals that of
padded passes. Flash-attention and shared sequences compute every prompt again.

Shapes: B padded rows of L columns, P of them prompt; N tokens that are computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from strop.models.attention import WholeSequences
from strop.models.packing import Packing
from strop.models.passes.micro_batch import on_cpu


def prompt_width(batch: Mapping[str, Tensor]) -> int:
    """Return P, the number of columns before the responses."""
    return batch["input_ids"].shape[1] - batch["response_mask"].shape[1]


def first_with_prompt(batch: Mapping[str, Tensor]) -> Tensor:
    """Return for each row [B] the first row with the same prompt, which may be the row itself; on the CPU."""
    width = prompt_width(batch)
    mask_BP = on_cpu(batch, "attention_mask")[:, :width].bool()
    prompts_BP = on_cpu(batch, "input_ids")[:, :width].masked_fill(~mask_BP, -1)
    prompt_B = prompts_BP.unique(dim=0, return_inverse=True)[1]
    rows_B = torch.arange(len(prompt_B), device=prompt_B.device)
    return torch.full_like(rows_B, len(rows_B)).scatter_reduce(0, prompt_B, rows_B, "amin")[prompt_B]


class PromptsOnce(Packing):
    """One packed row with the prompt of each first sample, and the responses of all."""

    def __init__(self, batch: Mapping[str, Tensor], *, with_last: bool) -> None:
        """Lay out the row; with ``with_last`` the last token of each response is computed, too."""
        mask_BL, width = on_cpu(batch, "attention_mask").bool(), prompt_width(batch)
        if not with_last:
            follows_BL = mask_BL.flip(1).cumsum(1).flip(1) > 1
            mask_BL = torch.cat([mask_BL[:, :width], (mask_BL & follows_BL)[:, width:]], dim=1)
        super().__init__(mask_BL, batch["input_ids"].device)
        first_B = first_with_prompt(batch)
        repeats_B = first_B != torch.arange(len(first_B), device=first_B.device)
        self._computed_BL = mask_BL.clone()
        self._computed_BL[repeats_B, :width] = False
        self._shared_place_BL = self._computed_BL.flatten().cumsum(0).view_as(mask_BL) - 1
        self._shared_place_BL[:, :width] = self._shared_place_BL[first_B, :width]
        samples_B = first_B.bincount(minlength=len(first_B))
        prompts = mask_BL[:, :width].sum(dim=1).tolist()
        self._starts = [
            [0] if samples == 1 else [0, prompt] if samples else [prompt]
            for prompt, samples in zip(prompts, samples_B.tolist(), strict=True)
        ]

    @property
    def _place_BL(self) -> Tensor:  # noqa: N802 - a tensor
        return self._shared_place_BL

    def options(self, implementation: str) -> dict[str, Any]:
        """Return the option that gives attention the layout of whole sequences."""
        layout = (self._mask_BL, self._computed_BL, self._shared_place_BL, self._starts)
        whole = WholeSequences(*layout, device=self._device)
        return {"whole_sequences": whole}
