"""Rows with given answers -> batches in the layout of rollouts, which every model's passes understand.

Shapes: B rows, P = max_prompt_length, T = max_response_length, L = P + T.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from strop.data.collate import collate
from strop.protocol import DataProto

Rows = Sequence[dict[str, Any]]


def response_batch(
    rows: Rows, *, pad_token_id: int, max_prompt_length: int, max_response_length: int
) -> DataProto:
    """Each row's prompt with its ``response``.

    ``input_ids``, ``attention_mask``, ``position_ids`` int64 [B, L], prompts padded on the left and
    responses on the right; ``responses`` int64 [B, T], ``response_mask`` float32 [B, T].
    """
    prompts = _prompts(rows, pad_token_id, max_prompt_length)
    responses, mask = _padded([row["response"] for row in rows], pad_token_id, max_response_length)
    return _joined(prompts, responses, mask, mask)


def pair_batch(
    rows: Rows, *, pad_token_id: int, max_prompt_length: int, max_response_length: int
) -> DataProto:
    """Each row's prompt with its answers ``chosen`` and ``rejected``: a pair is one row, never to be parted.

    As ``response_batch`` with the chosen answer, but ``attention_mask`` covers the longer one of the two;
    and the other in ``rejected`` int64 [B, T] and ``rejected_mask`` float32 [B, T].
    """
    prompts = _prompts(rows, pad_token_id, max_prompt_length)
    chosen, chosen_mask = _padded([row["chosen"] for row in rows], pad_token_id, max_response_length)
    rejected, rejected_mask = _padded([row["rejected"] for row in rows], pad_token_id, max_response_length)
    batch = _joined(prompts, chosen, chosen_mask, torch.maximum(chosen_mask, rejected_mask))
    return batch.union(DataProto({"rejected": rejected, "rejected_mask": rejected_mask}))


def _prompts(rows: Rows, pad_token_id: int, max_prompt_length: int) -> DataProto:
    named = [{name: row[name] for name in ("input_ids", "data_source")} for row in rows]
    return collate(named, pad_token_id=pad_token_id, max_prompt_length=max_prompt_length)


def _padded(answers: Sequence[Tensor], pad_token_id: int, width: int) -> tuple[Tensor, Tensor]:
    """Ids int64 [B, width], padded on the right, and the mask float32 [B, width] of real tokens."""
    ids = torch.full((len(answers), width), pad_token_id, dtype=torch.int64)
    mask = torch.zeros((len(answers), width))
    for row, answer in enumerate(answers):
        ids[row, : len(answer)] = answer
        mask[row, : len(answer)] = 1
    return ids, mask


def _joined(prompts: DataProto, responses: Tensor, response_mask: Tensor, seen: Tensor) -> DataProto:
    """``seen`` [B, T]: the response columns that a pass needs."""
    attention_mask = torch.cat([prompts.batch["attention_mask"], seen.long()], dim=1)
    return DataProto(
        {
            "input_ids": torch.cat([prompts.batch["input_ids"], responses], dim=1),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(dim=1) - 1).clamp(min=0),
            "responses": responses,
            "response_mask": response_mask,
        },
        prompts.non_tensor_batch,
    )
