"""Rows -> one batch, left-padded. Shapes: B rows, P = max_prompt_length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from strop.errors import DataError
from strop.protocol import DataProto


def collate(rows: Sequence[dict[str, Any]], *, pad_token_id: int, max_prompt_length: int) -> DataProto:
    """A batch from the rows of :class:`~strop.data.rl_dataset.RLHFDataset`.

    Tensors, all int64 [B, P]: ``input_ids``, ``attention_mask`` and ``position_ids`` = clip(cumsum(mask) -
    1, 0). Prompts stand at the right end, so generation continues at column P for every row; P does not
    depend on the batch. All other fields become object columns [B].

    Raises :class:`DataError` when a prompt is longer than P, or when the rows have different fields.
    """
    if not rows:
        raise DataError("collate: a batch needs at least one row")
    input_ids_BP = torch.full((len(rows), max_prompt_length), pad_token_id, dtype=torch.int64)
    attention_mask_BP = torch.zeros_like(input_ids_BP)
    names = rows[0].keys()
    for number, row in enumerate(rows):
        if row.keys() != names:
            raise DataError(
                f"collate: row {number} of the batch has other fields: {sorted(row.keys() ^ names)}"
            )
        length = len(row["input_ids"])
        if length > max_prompt_length:
            raise DataError(
                f"collate: row {number} of the batch has {length} prompt tokens, "
                f"the limit is {max_prompt_length}"
            )
        # max_prompt_length - length, not -length: a slice from -0 would be the whole row.
        input_ids_BP[number, max_prompt_length - length :] = row["input_ids"]
        attention_mask_BP[number, max_prompt_length - length :] = 1
    return DataProto.from_dict(
        tensors={
            "input_ids": input_ids_BP,
            "attention_mask": attention_mask_BP,
            "position_ids": (attention_mask_BP.cumsum(dim=-1) - 1).clamp(min=0),
        },
        non_tensors={name: [row[name] for row in rows] for name in names if name != "input_ids"},
    )
