"""Split a batch into micro-batches. The split changes memory and speed, never a result.

Rows of similar length share a micro-batch, and columns that are padding in all of them are dropped.

Shapes: B rows, L = P + T padded columns of a sequence, T padded response columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from strop.algorithms.token_tree import has_branches, leaves
from strop.errors import ConfigError
from strop.models.passes.micro_batch import MicroBatch
from strop.models.prompts_once import first_with_prompt
from strop.protocol import DataProto


@dataclass(frozen=True)
class MicroBatching:
    """Size of micro-batches: ``rows`` sequences, or as many as fit under ``max_tokens``."""

    rows: int | None = None
    max_tokens: int | None = None

    def split(self, batch: DataProto, at_least: int = 1, *, packed: bool = False) -> list[Tensor]:
        """Return the row indices of each micro-batch; rows of similar length share one.

        With ``packed`` the samples of a prompt share one as far as they fit. ``max_tokens`` bounds rows x
        columns of a micro-batch after ``trim``, or its real tokens with ``packed``; one row above it is a
        ``ConfigError``. Rows whose tokens form a tree count as the sequences of their leaves, whose tokens no
        key bounds: one above the bound has a micro-batch of its own. The longest micro-batches are halved
        until there are ``at_least`` many; with fewer rows the last ones are empty.
        """
        pieces = self._pieces(batch, packed)
        while len(pieces) < at_least:
            longest = max(range(len(pieces)), key=lambda index: len(pieces[index]))
            half = (len(pieces[longest]) + 1) // 2
            pieces[longest : longest + 1] = [pieces[longest][:half], pieces[longest][half:]]
        return pieces

    def holding_rows_of(self, batch: DataProto) -> MicroBatching:
        """Return a size whose cap holds the longest row of ``batch``, which no configuration bounds."""
        if self.max_tokens is None or not len(batch):
            return self
        return MicroBatching(max_tokens=max(self.max_tokens, int(batch.batch["attention_mask"].sum(1).max())))

    def _pieces(self, batch: DataProto, packed: bool) -> list[Tensor]:
        if "follows" not in batch or not (tree_B := has_branches(batch.batch["follows"])).any():
            return self._of_rows(batch, packed)
        # apart, so that trees have no influence on the passes of plain rows
        plain, trees = (~tree_B).nonzero()[:, 0], tree_B.nonzero()[:, 0]
        pieces = [trees[piece] for piece in self._of_trees(batch[trees], packed)]
        return (
            [plain[piece] for piece in self._of_rows(batch[plain], packed)] + pieces if len(plain) else pieces
        )

    def _of_trees(self, batch: DataProto, packed: bool) -> list[Tensor]:
        parts: list[list[tuple[int, int]]] = [[] for _ in range(len(batch))]
        for leaf in leaves(batch.batch):
            parts[leaf.row].append((leaf.first, len(leaf.columns_K) - leaf.first))

        def is_too_large(rows: list[int]) -> bool:
            before, after = zip(*(lengths for row in rows for lengths in parts[row]), strict=True)
            if self.max_tokens is None:
                return self.rows is not None and len(before) > self.rows
            padded = len(before) * (max(before) + max(after))  # the columns of strop.models.tree
            return (sum(before) + sum(after) if packed else padded) > self.max_tokens

        pieces: list[list[int]] = [[]]
        for row in sorted(range(len(batch)), key=lambda row: -sum(map(sum, parts[row]))):
            if pieces[-1] and is_too_large([*pieces[-1], row]):
                pieces.append([])
            pieces[-1].append(row)
        return [torch.tensor(rows) for rows in pieces]

    def _of_rows(self, batch: DataProto, packed: bool) -> list[Tensor]:
        lengths_B = batch.batch["attention_mask"].sum(dim=1)
        # stable: equal lengths keep the batch's order, so the split is the same on every machine
        order_B = torch.argsort(lengths_B, descending=True, stable=True)
        if packed and "response_mask" in batch:
            order_B = _prompts_together(order_B, first_with_prompt(batch.batch))
        if self.max_tokens is None:
            return list(order_B.split(self.rows or len(batch)))
        longest = int(lengths_B.max())
        if longest > self.max_tokens:
            raise ConfigError(
                f"a sequence of {longest} tokens exceeds the cap of {self.max_tokens} per micro-batch; "
                "raise the *_max_token_len_per_gpu key to at least max_prompt_length + max_response_length"
            )
        lengths, firsts, ends = (column_B.tolist() for column_B in (lengths_B, *_extents(batch)))
        pieces: list[list[int]] = [[]]
        tokens, first, end = 0, batch.batch["attention_mask"].shape[1], 0
        for row in order_B.tolist():
            wider = min(first, firsts[row]), max(end, ends[row])
            tokens = tokens + lengths[row] if packed else (len(pieces[-1]) + 1) * (wider[1] - wider[0])
            if tokens > self.max_tokens and pieces[-1]:
                pieces.append([])
                tokens, wider = lengths[row], (firsts[row], ends[row])
            pieces[-1].append(row)
            first, end = wider
        return [torch.tensor(rows) for rows in pieces]


def _prompts_together(order_B: Tensor, first_B: Tensor) -> Tensor:
    """Reorder rows so that those with one prompt are adjacent, at the place of the first of them."""
    prompt_B = first_B[order_B]
    places_B = torch.arange(len(order_B))
    earliest_B = torch.full_like(places_B, len(places_B)).scatter_reduce(0, prompt_B, places_B, "amin")
    return order_B[earliest_B[prompt_B].argsort(stable=True)]


def trim(batch: DataProto) -> dict[str, Tensor]:
    """Return the tensors of a micro-batch without the columns that are padding in every row.

    Tensors as wide as ``attention_mask`` [B, L] are cut on both sides, tensors as wide as ``response_mask``
    [B, T] on the right. At least one prompt and one response column remain.
    """
    width, response_width = batch.batch["attention_mask"].shape[1], _response_width(batch)
    first_B, end_B = _extents(batch)
    first, end = int(first_B.min()), int(end_B.max())
    trimmed = {}
    for name, tensor in batch.batch.items():
        if name in ("input_ids", "attention_mask", "position_ids"):
            trimmed[name] = tensor[:, first:end]
        # a row has any number of pictures
        elif name != "images" and response_width and tensor.dim() > 1 and tensor.shape[1] == response_width:
            trimmed[name] = tensor[:, : response_width - (width - end)]
        else:
            trimmed[name] = tensor
    return trimmed


def _response_width(batch: DataProto) -> int:
    """Return T; 0 without a ``response_mask``."""
    return batch.batch["response_mask"].shape[1] if "response_mask" in batch else 0


def _extents(batch: DataProto) -> tuple[Tensor, Tensor]:
    """Return the first column [B] that each row needs, and the one after its last."""
    mask_BL, response_width = batch.batch["attention_mask"].bool().int(), _response_width(batch)
    width = mask_BL.shape[1]
    # of equal numbers argmax returns the first: the first token, and seen from the end the last one
    first_B = mask_BL.argmax(dim=1)
    end_B = width - mask_BL.flip(1).argmax(dim=1)
    if not response_width:
        return first_B, end_B
    # the column before the responses predicts the first of them, so it is needed in any case
    boundary = width - response_width
    return first_B.clamp(max=max(boundary - 1, 0)), end_B.clamp(min=boundary + 1)


def columns_of(batch: DataProto, rows: Tensor, device: torch.device) -> MicroBatch:
    """Return the trimmed columns of a micro-batch on ``device``; of an empty one those of a masked row.

    Another rank has a micro-batch then.
    """
    # this rank must take part in the other's collectives
    return MicroBatch.on(device, trim(batch[rows] if len(rows) else masked_row(batch)))


def masked_row(batch: DataProto) -> DataProto:
    """Return the first row of a batch with a ``response_mask`` of zeros."""
    row = batch[torch.zeros(1, dtype=torch.long)]
    if "response_mask" in row:
        row.batch["response_mask"] = torch.zeros_like(row.batch["response_mask"])
    return row


def require_no_tree(batch: DataProto, setting: str, remedy: str) -> None:
    """Raise ``ConfigError`` for a column ``follows``: passes by this ``setting`` do not unfold it."""
    if "follows" in batch:
        raise ConfigError(
            f"{setting}: its passes do not unfold the column follows of the batch, in which the tokens of a "
            f"session form a tree; {remedy}"
        )


def restore(pieces: list[dict[str, Tensor]], rows: list[Tensor], batch: DataProto) -> dict[str, Tensor]:
    """Concatenate the outputs of micro-batches in the batch's order and width, on the CPU."""
    # the inverse of the permutation that split made
    order, response_width = torch.argsort(torch.cat(rows)), _response_width(batch)
    whole = {}
    for name in pieces[0]:
        widened = []
        for piece in pieces:
            tensor = piece[name]
            if tensor.dim() > 1 and tensor.shape[1] < response_width:
                missing = tensor.new_zeros(len(tensor), response_width - tensor.shape[1], *tensor.shape[2:])
                tensor = torch.cat([tensor, missing], dim=1)
            widened.append(tensor)
        whole[name] = torch.cat(widened).cpu()[order]  # indices on the CPU would be copied to a GPU first
    return whole
