"""Rows with shared prompts: which tokens attend together, and copies of the keys of prompts.

A prompt attends to itself once, and each response to its prompt and itself. ``runs`` group pieces of
sequences that attend in one padded call; ``by_lengths`` lays out all pieces for a single call.

Shapes: B rows of L columns, or of K tokens; N tokens that are computed, S pieces of one run with T queries
each, M queries or keys of all pieces, A heads, D head size.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from strop.models.passes.micro_batch import send

_ALIKE = 0.8
"""Pieces of sequences of at least this share of the longest are padded to it and attend in one call."""
_ONE_CALL = 2048
"""Pairs of a query and a key that take about the time of a call's fixed cost, in a small model on a CPU."""
_LARGEST_MASK = 1 << 20
"""Numbers in the masks of a run whose sequences need one each."""
_SUMMED_AT_ONCE = 1 << 24
"""Numbers of a 16-bit gradient that are converted to float32 together: 64 MiB."""


@dataclass
class Run:
    """Pieces of sequences that attend in one call: from ``firsts`` on, to all tokens before them."""

    rows: list[int]
    firsts: list[int]
    lengths: list[int]
    queries: int
    """The longest piece, to which the others are padded."""
    keys: int
    """The last end of a piece; the others have more keys, which none of their queries attends to."""
    begin_together: bool = True

    def add(self, row: int, first: int, end: int) -> None:
        self.begin_together &= first == self.firsts[0]
        self.rows.append(row)
        self.firsts.append(first)
        self.lengths.append(end - first)
        self.queries, self.keys = max(self.queries, end - first), max(self.keys, end)

    def padding_with(self, first: int, end: int) -> int | None:
        """Return the pairs of a query and a key that one more piece adds to its own; None: too many."""
        queries, keys = max(self.queries, end - first), max(self.keys, end)
        pairs = (len(self.rows) + 1) * queries * keys
        added = pairs - len(self.rows) * self.queries * self.keys - (end - first) * end
        same = self.begin_together and self.firsts[0] == first
        if same and min(self.queries, end - first) >= _ALIKE * queries:
            return added
        return added if added <= _ONE_CALL and (same or pairs <= _LARGEST_MASK) else None


def _pieces_of(starts: list[list[int]], lengths: list[int]) -> list[tuple[int, int, int]]:
    """Return (first, end, row) of the tokens that attend together, to all tokens of the row before them."""
    return [
        (first, end, row)
        for row, (begins, length) in enumerate(zip(starts, lengths, strict=True))
        for first, end in itertools.pairwise([*begins, length])
        if end > first
    ]


def runs_of(starts: list[list[int]], lengths: list[int]) -> list[Run]:
    """Group pieces in which padding costs little, or less than a call for each of them."""
    runs: list[Run] = []
    before, run = None, None
    # the most keys first, so that no later piece widens a run's keys
    for first, end, row in sorted(_pieces_of(starts, lengths), key=lambda piece: (-piece[1], piece[0])):
        if run is not None and before == (first, end) and run.padding_with(first, end) is not None:
            run.add(row, first, end)  # an equal piece has the same best run
            continue
        before = first, end
        fitting = [(padding, run) for run in runs if (padding := run.padding_with(first, end)) is not None]
        if fitting:
            run = min(fitting, key=itemgetter(0))[1]
            run.add(row, first, end)
        else:
            run = Run([row], [first], [end - first], end - first, end)
            runs.append(run)
    return runs


class SharedPrompts:
    """Places of queries and keys of rows with shared prompts: each prompt once, and each response.

    A response attends to its prompt and itself. Each kind of attention has a layout, computed on first use.
    """

    def __init__(
        self,
        mask_BL: Tensor,
        computed_BL: Tensor,
        place_BL: Tensor,
        starts: list[list[int]],
        *,
        device: torch.device,
    ) -> None:
        """Prepare the layout for attention on ``device``, from tensors on the CPU.

        ``mask_BL`` marks real tokens, ``computed_BL`` those in the packed row, ``place_BL`` is each token's
        place there. ``starts`` has, for each row, the tokens at which a separately attending piece begins.
        """
        self._starts, self._lengths, self._device = starts, mask_BL.sum(dim=1).tolist(), device
        token_BL = (mask_BL.cumsum(dim=1) - 1).clamp(min=0)
        self._place_BK = place_BL.new_zeros(len(self._lengths), max(self._lengths))
        rows, columns = mask_BL.nonzero(as_tuple=True)
        self._place_BK[rows, token_BL[rows, columns]] = place_BL[rows, columns]
        self._token_N, self._row_N = token_BL[computed_BL], computed_BL.nonzero()[:, 0]

    @cached_property
    def runs(self) -> tuple[list[Run], Tensor, Tensor, Tensor]:
        """Runs, their queries and keys, and the tokens' places among the queries.

        A run pads pieces to the longest. The padding follows a piece, so none of its tokens attends to it.
        """
        place_BK, runs = self._place_BK, runs_of(self._starts, self._lengths)
        queries, keys, laid_BK, laid = [], [], torch.zeros_like(place_BK), 0
        for run in runs:
            rows_S1, firsts_S1, lengths_S1 = (
                torch.tensor(column)[:, None] for column in (run.rows, run.firsts, run.lengths)
            )
            steps_T = torch.arange(run.queries)
            # padding behind a piece repeats a token; its result is not read
            tokens_ST = (firsts_S1 + steps_T).clamp(max=place_BK.shape[1] - 1)
            queries.append(place_BK[rows_S1, tokens_ST].flatten())
            # places past a shorter row are 0, a real token, to which none of the row's queries attends
            keys.append(place_BK[run.rows, : run.keys].flatten())
            real_ST = steps_T < lengths_S1
            places_ST = torch.arange(laid, laid + real_ST.numel()).view_as(real_ST)
            laid_BK[rows_S1.expand_as(real_ST)[real_ST], tokens_ST[real_ST]] = places_ST[real_ST]
            laid += real_ST.numel()
        columns = torch.cat(queries), torch.cat(keys), laid_BK[self._row_N, self._token_N]
        queries_M, keys_M, laid_N = (send(column, self._device) for column in columns)
        return runs, queries_M, keys_M, laid_N

    @cached_property
    def by_lengths(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, int]:
        """Queries and keys of all pieces, tokens' places among the queries, ends, and the longest pieces."""
        device, columns = self._device, self._place_BK.shape[1]
        pieces = torch.tensor(_pieces_of(self._starts, self._lengths), dtype=torch.long)
        first_S, end_S, row_S = pieces.t()
        q_lengths_S = end_S - first_S
        queries_M, q_ends = _ranges(row_S * columns + first_S, q_lengths_S)
        keys_M, k_ends = _ranges(row_S * columns, end_S)
        laid = torch.zeros(self._place_BK.numel(), dtype=torch.long)
        laid[queries_M] = torch.arange(len(queries_M))
        places = self._place_BK.flatten()
        return (
            send(places[queries_M], device),
            send(places[keys_M], device),
            send(laid[self._row_N * columns + self._token_N], device),
            send(q_ends.int(), device),
            send(k_ends.int(), device),
            int(q_lengths_S.max()),
            int(end_S.max()),
        )


def _ranges(start_S: Tensor, length_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return start, start + 1, ... of each range [M], and where ranges end in it, from 0 [S + 1]."""
    ends = torch.cat([length_S.new_zeros(1), length_S.cumsum(0)])
    offsets_S = start_S - ends[:-1]
    return torch.arange(int(ends[-1])) + offsets_S.repeat_interleave(length_S), ends


def copies_of(states_NAD: Tensor, places_M: Tensor) -> Tensor:
    """Return the states at ``places_M`` [M, A, D]; gradients of copies of a token add up in float32."""
    if _rounds_each_sum(states_NAD):
        return _Copies.apply(states_NAD, places_M)
    return states_NAD.index_select(0, places_M)


def _rounds_each_sum(states: Tensor) -> bool:
    """Return True if the gradient of ``index_select`` is rounded at each copy of a token, as on GPUs.

    A prompt's token has a copy for each sample. On a CPU torch adds them in float32.
    """
    return states.element_size() == 2 and states.device.type != "cpu"


class _Copies(torch.autograd.Function):
    """See ``copies_of``."""

    @staticmethod
    def forward(ctx: Any, states_NAD: Tensor, places_M: Tensor) -> Tensor:
        ctx.save_for_backward(places_M)
        ctx.shape = states_NAD.shape
        return states_NAD.index_select(0, places_M)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_MAD: Tensor) -> tuple[Tensor, None]:
        (places_M,) = ctx.saved_tensors
        # in 16 bits atomic additions round once a sample, in any order: the error grows with their number
        total_NAD = gradient_MAD.new_zeros(ctx.shape, dtype=torch.float32)
        rows = max(_SUMMED_AT_ONCE // ctx.shape[1:].numel(), 1)
        for places, part in zip(places_M.split(rows), gradient_MAD.split(rows), strict=True):
            total_NAD.index_add_(0, places, part.float())
        return total_NAD.to(gradient_MAD.dtype), None
