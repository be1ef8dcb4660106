"""Cut a batch into micro-batches. How it is cut changes memory and speed, never a number.

Shapes: B rows, L = P + T padded columns of a sequence, T padded response columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from strop.errors import ConfigError
from strop.models.prompts_once import first_with_prompt
from strop.protocol import DataProto


@dataclass(frozen=True)
class MicroBatching:
    """Either ``rows`` sequences at a time, or as many as fit under ``max_tokens`` (dynamic batching)."""

    rows: int | None = None
    max_tokens: int | None = None

    def split(self, batch: DataProto, at_least: int = 1, *, packed: bool = False) -> list[Tensor]:
        """Row indices of each micro-batch. Rows of like length share one, so that little of it is padding.

        Of those that are to be ``packed``, the samples of a prompt share one as far as they fit.
        ``max_tokens`` bounds what is left of a micro-batch after ``trim``, rows x columns, or its real tokens
        if they are to be ``packed``, and is strict: a single row above it is a ``ConfigError``. Fewer
        micro-batches than ``at_least`` are halved until there are so many; when there are not as many rows,
        the last ones are empty.
        """
        pieces = self._pieces(batch, packed)
        while len(pieces) < at_least:
            longest = max(range(len(pieces)), key=lambda index: len(pieces[index]))
            half = (len(pieces[longest]) + 1) // 2
            pieces[longest : longest + 1] = [pieces[longest][:half], pieces[longest][half:]]
        return pieces

    def _pieces(self, batch: DataProto, packed: bool) -> list[Tensor]:
        lengths_B = batch.batch["attention_mask"].sum(dim=1)
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
    """The rows in this order, each followed by the others with its prompt, which packed passes share."""
    prompt_B = first_B[order_B]
    places_B = torch.arange(len(order_B))
    earliest_B = torch.full_like(places_B, len(places_B)).scatter_reduce(0, prompt_B, places_B, "amin")
    return order_B[earliest_B[prompt_B].argsort(stable=True)]


def trim(batch: DataProto) -> dict[str, Tensor]:
    """The tensors of a micro-batch without the columns that are padding in every row.

    Columns as wide as ``attention_mask`` [B, L] lose them on both sides, columns as wide as
    ``response_mask`` [B, T] on the right. At least one prompt and one response column stay.
    """
    width, response_width = batch.batch["attention_mask"].shape[1], _response_width(batch)
    first_B, end_B = _extents(batch)
    first, end = int(first_B.min()), int(end_B.max())
    trimmed = {}
    for name, tensor in batch.batch.items():
        if name in ("input_ids", "attention_mask", "position_ids"):
            trimmed[name] = tensor[:, first:end]
        elif response_width and tensor.dim() > 1 and tensor.shape[1] == response_width:
            trimmed[name] = tensor[:, : response_width - (width - end)]
        else:
            trimmed[name] = tensor
    return trimmed


def _response_width(batch: DataProto) -> int:
    """T; 0 where the batch does not say."""
    return batch.batch["response_mask"].shape[1] if "response_mask" in batch else 0


def _extents(batch: DataProto) -> tuple[Tensor, Tensor]:
    """The first column [B] that each row needs, and the one after its last."""
    mask_BL, response_width = batch.batch["attention_mask"].bool().int(), _response_width(batch)
    width = mask_BL.shape[1]
    first_B = mask_BL.argmax(dim=1)
    end_B = width - mask_BL.flip(1).argmax(dim=1)
    if not response_width:
        return first_B, end_B
    boundary = width - response_width
    return first_B.clamp(max=max(boundary - 1, 0)), end_B.clamp(min=boundary + 1)


def restore(pieces: list[dict[str, Tensor]], rows: list[Tensor], response_width: int) -> dict[str, Tensor]:
    """Put the outputs of micro-batches back into the batch's order and width."""
    order = torch.argsort(torch.cat(rows))
    whole = {}
    for name in pieces[0]:
        widened = []
        for piece in pieces:
            tensor = piece[name]
            if tensor.dim() > 1 and tensor.shape[1] < response_width:
                missing = tensor.new_zeros(len(tensor), response_width - tensor.shape[1], *tensor.shape[2:])
                tensor = torch.cat([tensor, missing], dim=1)
            widened.append(tensor)
        whole[name] = torch.cat(widened)[order]
    return whole
