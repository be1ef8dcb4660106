"""Rows of a batch over data-parallel ranks, and back: which rank gets which row is decided here.

Membership of a mini-batch was fixed before; this moves rows inside it only, so no number depends on it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.protocol import DataProto


@dataclass(frozen=True)
class Shards:
    """One part of a batch for each data-parallel rank, all with the same number of rows."""

    parts: list[DataProto]
    rows: list[Tensor]
    """By rank, which rows of the batch it has; what its part holds beyond them is padding."""

    def join(self, results: list[DataProto]) -> DataProto:
        """The rows of all results in the batch's order; padding is dropped.

        A result has k rows for each row it was given (k samples of a prompt), adjacent ones.
        """
        if len(results) == 1:
            return results[0]
        sent, received = len(self.parts[0]), len(results[0])
        if any(len(result) != received for result in results) or received % sent:
            raise ValueError(f"{sent} rows went to each rank, {[len(r) for r in results]} came back")
        home = torch.empty(sum(map(len, self.rows)), dtype=torch.long)
        for rank, rows in enumerate(self.rows):
            home[rows] = rank * sent + torch.arange(len(rows))
        each = received // sent
        places = (home[:, None] * each + torch.arange(each)).flatten()
        return DataProto.concat(results)[places]


def shard(batch: DataProto, ranks: int) -> Shards:
    """Spread the rows over ``ranks``; a single rank gets the batch as it is.

    The longest rows are dealt first, each to the rank with the fewest tokens that has room for one more
    (Graham's rule for scheduling, with equal counts). On a rank the rows keep the batch's order. Padding
    repeats row 0 with a ``response_mask`` of zeros: it cannot count in a loss.

    Raises ``ValueError`` for an empty batch.
    """
    if not len(batch):
        raise ValueError("an empty batch cannot be spread over ranks")
    if ranks == 1:
        return Shards([batch], [torch.arange(len(batch))])
    each = -(-len(batch) // ranks)
    rows, parts = [], []
    for own in _deal(_lengths(batch), ranks, each):
        missing = each - len(own)
        part = batch[own + [0] * missing]
        if missing and "response_mask" in part.batch:
            mask = part.batch["response_mask"].clone()
            mask[len(own) :] = 0
            part = DataProto({**part.batch, "response_mask": mask}, part.non_tensor_batch, part.meta_info)
        rows.append(torch.tensor(own, dtype=torch.long))
        parts.append(part)
    return Shards(parts, rows)


def _lengths(batch: DataProto) -> list[int]:
    """Tokens of each row; all alike where the batch does not say."""
    if "attention_mask" not in batch.batch:
        return [1] * len(batch)
    return batch.batch["attention_mask"].sum(dim=1).tolist()


def _deal(lengths: list[int], ranks: int, most: int) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in range(ranks)]
    open_ranks = [(0, 0, rank) for rank in range(ranks)]  # a heap of (tokens, rows, rank)
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        tokens, count, rank = heapq.heappop(open_ranks)
        rows[rank].append(row)
        if count + 1 < most:
            heapq.heappush(open_ranks, (tokens + lengths[row], count + 1, rank))
    return [sorted(own) for own in rows]
