"""Packed passes that compute a prompt once for all of its samples, and nothing that no loss depends on.

In a causal model nothing that a response says changes what was computed of its prompt. So the samples of a
prompt share its tokens in every layer, forward and backward: of 8 samples with prompts as long as responses,
7 tokens of 16 need not be computed. Nor need the last token of a response, which foretells no other.
Responses still attend to whole sequences: to copies of a prompt's keys and values, whose gradients add up.

Shapes: B padded rows of L columns, P of them prompt; N tokens that are computed; S sequences of a run with T
queries and K keys each, M of either in all runs; Q query heads, G key-value heads, A of either, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from strop.models.packing import Packing, attend

_LIKE = 0.8
"""Pieces of sequences of at least this share of the longest are filled up to it, and attend in one call."""


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
        samples_B = first_B.bincount(minlength=len(first_B))
        prompts = mask_BL[:, :width].sum(dim=1).tolist()
        self._starts = [
            [0] if samples == 1 else [0, prompt] if samples else [prompt]
            for prompt, samples in zip(prompts, samples_B.tolist(), strict=True)
        ]

    def pack(self, values_BL: Tensor) -> Tensor:
        """[1, N]: the columns of the first row that are computed, then those of the second, and so on."""
        return values_BL[self._computed_BL][None]

    @property
    def _place_BL(self) -> Tensor:  # noqa: N802 - a tensor
        return self._shared_place_BL

    def options(self, implementation: str) -> dict[str, Any]:
        """How attention is told what the whole sequences are."""
        whole = WholeSequences(self._mask_BL, self._computed_BL, self._shared_place_BL, self._starts)
        return {"whole_sequences": whole}


class _Run(NamedTuple):
    """Sequences that attend in one call: their tokens from ``first`` to ``end``, to all before."""

    rows: list[int]
    first: int
    end: int

    def mask(self, window: int | None, device: torch.device) -> Tensor | None:
        """[1, 1, T, K] of what each query sees; None where queries and keys are the same tokens, all seen."""
        if self.first == 0 and (window is None or self.end <= window):
            return None
        place_K = torch.arange(self.end, device=device)
        distance_TK = place_K[self.first :, None] - place_K
        seen_TK = distance_TK >= 0
        return (seen_TK if window is None else seen_TK & (distance_TK < window))[None, None]


class WholeSequences:
    """Who attends to whom: prompts that are shared to themselves, once, and their responses to both.

    A run fills sequences up to the longest; what fills one up follows it, so no token of it attends to that.
    """

    def __init__(
        self, mask_BL: Tensor, computed_BL: Tensor, place_BL: Tensor, starts: list[list[int]]
    ) -> None:
        """The real tokens, those computed, where each of the former is in the packed row, and the ``starts``.

        Those are, for each row, the tokens of its sequence at which a piece begins that attends by itself.
        """
        lengths = mask_BL.sum(dim=1).tolist()
        token_BL = (mask_BL.cumsum(dim=1) - 1).clamp(min=0)
        place_BK = place_BL.new_zeros(len(lengths), max(lengths))
        rows, columns = mask_BL.nonzero(as_tuple=True)
        place_BK[rows, token_BL[rows, columns]] = place_BL[rows, columns]
        self._runs = _runs(starts, lengths)
        queries, keys, laid_BK, laid = [], [], torch.zeros_like(place_BK), 0
        for run in self._runs:
            queries.append(place_BK[run.rows, run.first : run.end].flatten())
            keys.append(place_BK[run.rows, : run.end].flatten())
            places = torch.arange(laid, laid + len(queries[-1]), device=laid_BK.device)
            laid_BK[run.rows, run.first : run.end] = places.view(len(run.rows), -1)
            laid += len(places)
        self._queries_M, self._keys_M = torch.cat(queries), torch.cat(keys)
        self._laid_N = laid_BK.gather(1, token_BL)[computed_BL]
        self._masks: dict[int | None, list[Tensor | None]] = {}

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        window: int | None,
        **options: Any,
    ) -> Tensor:
        """Query [1, Q, N, D], key and value [1, G, N, D] of computed tokens -> [1, N, Q, D]."""
        if window not in self._masks:
            self._masks[window] = [run.mask(window, query.device) for run in self._runs]
        # one selection for all runs and split, not one each: each would make a gradient of full size
        sizes = [len(run.rows) * (run.end - run.first) for run in self._runs]
        queries = _tokens(query).index_select(0, self._queries_M).split(sizes)
        sizes = [len(run.rows) * run.end for run in self._runs]
        keys, values = (_tokens(states).index_select(0, self._keys_M).split(sizes) for states in (key, value))
        outputs = []
        for run, mask, *tokens in zip(self._runs, self._masks[window], queries, keys, values, strict=True):
            heads = [part.unflatten(0, (len(run.rows), -1)).transpose(1, 2) for part in tokens]
            outputs.append(attend(module, *heads, mask, **options).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self._laid_N)[None]


def _tokens(heads: Tensor) -> Tensor:
    """[1, A, N, D] -> [N, A, D]"""
    return heads.transpose(1, 2)[0]


def _runs(starts: list[list[int]], lengths: list[int]) -> list[_Run]:
    """All pieces, those that begin at the same token and are of like length together."""
    pieces = [
        (first, end, row)
        for row, (begins, length) in enumerate(zip(starts, lengths, strict=True))
        for first, end in itertools.pairwise([*begins, length])
        if end > first
    ]
    runs: list[_Run] = []
    for first, end, row in sorted(pieces, key=lambda piece: (piece[0], -piece[1])):
        longest = runs[-1] if runs else None
        if longest and first == longest.first and end - first >= _LIKE * (longest.end - first):
            longest.rows.append(row)
        else:
            runs.append(_Run([row], first, end))
    return runs
