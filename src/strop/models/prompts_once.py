"""Packed passes that compute a prompt once for all of its samples, and nothing that no loss depends on.

In a causal model nothing that a response says changes what was computed of its prompt. So the samples of a
prompt share its tokens in every layer, forward and backward: of 8 samples with prompts as long as responses,
7 tokens of 16 need not be computed. Nor need the last token of a response, which foretells no other.
Attention still sees whole sequences: it gets copies of a prompt's keys and values, whose gradients add up.

Shapes: B padded rows of L columns, P of them prompt; N tokens that are computed, M places of whole sequences,
S sequences laid out in one length K (a run), A heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from strop.models.packing import Packing, Runs

_SHORTEST_OF_A_RUN = 0.8
"""Sequences of at least this share of the longest are filled up to it, for one call of attention to all."""


def prompt_width(batch: Mapping[str, Tensor]) -> int:
    """P: the columns before the responses."""
    return batch["input_ids"].shape[1] - batch["response_mask"].shape[1]


def first_with_prompt(batch: Mapping[str, Tensor]) -> Tensor:
    """[B]: the first row that has the same prompt as this one; its own where there is no other."""
    width = prompt_width(batch)
    mask_BP = batch["attention_mask"][:, :width].bool()
    prompts_BP = batch["input_ids"][:, :width].masked_fill(~mask_BP, -1)
    prompt_B = prompts_BP.unique(dim=0, return_inverse=True)[1]
    rows_B = torch.arange(len(prompt_B), device=prompt_B.device)
    return torch.full_like(rows_B, len(rows_B)).scatter_reduce(0, prompt_B, rows_B, "amin")[prompt_B]


class PromptsOnce(Packing):
    """One packed row with the prompt of each first sample, and the responses of all."""

    def __init__(self, batch: Mapping[str, Tensor], *, with_last: bool) -> None:
        """``with_last``: whether the last token of each response is computed, too."""
        mask_BL, width = batch["attention_mask"].bool(), prompt_width(batch)
        if not with_last:
            follows_BL = mask_BL.flip(1).cumsum(1).flip(1) > 1
            mask_BL = torch.cat([mask_BL[:, :width], (mask_BL & follows_BL)[:, width:]], dim=1)
        super().__init__(mask_BL)
        first_B = first_with_prompt(batch)
        repeats_B = first_B != torch.arange(len(first_B), device=first_B.device)
        self._computed_BL = mask_BL.clone()
        self._computed_BL[repeats_B, :width] = False
        self._shared_place_BL = self._computed_BL.flatten().cumsum(0).view_as(mask_BL) - 1
        self._shared_place_BL[:, :width] = self._shared_place_BL[first_B, :width]

    def pack(self, values_BL: Tensor) -> Tensor:
        """[1, N]: the columns of the first row that are computed, then those of the second, and so on."""
        return values_BL[self._computed_BL][None]

    @property
    def _place_BL(self) -> Tensor:  # noqa: N802 - a tensor
        return self._shared_place_BL

    def options(self, implementation: str) -> dict[str, Any]:
        """How attention is told what the whole sequences are."""
        whole = WholeSequences(self._mask_BL, self._computed_BL, self._shared_place_BL)
        return {"sequence_runs": whole.runs, "whole_sequences": whole}


class WholeSequences:
    """The tokens of every sequence one after another, those of like length filled up to one.

    What fills up follows the sequence, so no token of it attends to that.
    """

    def __init__(self, mask_BL: Tensor, computed_BL: Tensor, place_BL: Tensor) -> None:
        """The real tokens, those that are computed, and where each of the former is in the packed row."""
        lengths_B = mask_BL.sum(dim=1)
        order_B = lengths_B.argsort(descending=True, stable=True)
        lengths = lengths_B[order_B].tolist()
        token_BL = mask_BL.cumsum(dim=1) - 1  # of its sequence
        rows, columns = mask_BL.nonzero(as_tuple=True)
        place_BK = place_BL.new_zeros(len(lengths), lengths[0])
        place_BK[rows, token_BL[rows, columns]] = place_BL[rows, columns]
        self.runs = _runs(lengths)
        begin_B, parts, first, tokens = torch.zeros_like(lengths_B), [], 0, 0
        for sequences, length in self.runs:
            rows_S = order_B[first : first + sequences]
            begin_B[rows_S] = tokens + length * torch.arange(sequences, device=rows_S.device)
            parts.append(place_BK[rows_S, :length].flatten())
            first, tokens = first + sequences, tokens + sequences * length
        self._place_M = torch.cat(parts)
        self._laid_N = (begin_B[:, None] + token_BL)[computed_BL]

    def lay_out(self, states_NAD: Tensor) -> Tensor:
        """[N, A, D] of the packed row -> [M, A, D] of whole sequences."""
        return states_NAD.index_select(0, self._place_M)

    def take_in(self, states_MAD: Tensor) -> Tensor:
        """[M, A, D] -> [N, A, D]; of a prompt's copies the one in its first sample."""
        return states_MAD.index_select(0, self._laid_N)


def _runs(lengths: list[int]) -> Runs:
    """(S, K) of the runs of sequences with these falling lengths; those without tokens are in none."""
    runs: list[tuple[int, int]] = []
    for length in lengths:
        if runs and length >= max(1, _SHORTEST_OF_A_RUN * runs[-1][1]):
            runs[-1] = runs[-1][0] + 1, runs[-1][1]
        elif length:
            runs.append((1, length))
    return tuple(runs)
