"""Distribute the rows of a batch over data-parallel ranks, and join their results.

Mini-batches are cut before, on the driver, so results do not depend on the number of ranks: sharding only
moves rows within one mini-batch. Every rank gets the same number of rows, because FSDP's collectives require
the same number of passes on every rank.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.algorithms.token_tree import computed_tokens
from strop.protocol import DataProto


@dataclass(frozen=True)
class Shards:
    """One part of a batch per data-parallel rank, all with the same number of rows."""

    parts: list[DataProto]
    rows: list[Tensor]
    """Row numbers in the batch, by rank; rows of a part beyond these are padding."""

    def join(self, results: list[DataProto]) -> DataProto:
        """Return the rows of all results in the order of the batch, without padding.

        A result may have k adjacent rows for each row of its part (k samples per prompt).
        """
        if len(results) == 1:
            return results[0]
        sent, received = len(self.parts[0]), len(results[0])
        if any(len(result) != received for result in results) or received % sent:
            raise ValueError(f"{sent} rows were sent to each rank, but {[len(r) for r in results]} returned")
        home = torch.empty(sum(map(len, self.rows)), dtype=torch.long)
        for rank, rows in enumerate(self.rows):
            # rows beyond len(rows) are padding, to which no place refers
            home[rows] = rank * sent + torch.arange(len(rows))
        each = received // sent
        places = (home[:, None] * each + torch.arange(each)).flatten()
        return DataProto.concat(results)[places]


def shard(batch: DataProto, ranks: int) -> Shards:
    """Distribute the rows over ``ranks``; a single rank gets the unchanged batch.

    Longest rows first, each to the rank with the fewest tokens that still has room (Graham's scheduling rule,
    with equal counts). Rows of a rank keep the order of the batch. Padding repeats row 0 with a
    ``response_mask`` of zeros, so that it has no effect on a loss.

    Raises ``ValueError`` for an empty batch.
    """
    if not len(batch):
        raise ValueError("an empty batch cannot be distributed over ranks")
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
    """Return tokens per row, of all leaves of a tree; 1 each if the batch has no ``attention_mask``."""
    if "attention_mask" not in batch.batch:
        return [1] * len(batch)
    if "follows" in batch.batch:
        return computed_tokens(batch.batch)
    return batch.batch["attention_mask"].sum(dim=1).tolist()


def _deal(lengths: list[int], ranks: int, most: int) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in range(ranks)]
    open_ranks = [(0, 0, rank) for rank in range(ranks)]  # a heap of (tokens, rows, rank)
    # sorted is stable, and the heap breaks ties by rows and rank: one deal for one batch
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        tokens, count, rank = heapq.heappop(open_ranks)
        rows[rank].append(row)
        if count + 1 < most:
            heapq.heappush(open_ranks, (tokens + lengths[row], count + 1, rank))
    return [sorted(own) for own in rows]
