"""A reward model in training: both answers to a prompt in one pass.

Shapes: B pairs, P prompt tokens, T response tokens, L = P + T.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from strop.models.prompts_once import prompt_width
from strop.models.scorer import SequenceScorer


class PairScorer(SequenceScorer):
    """Scores the chosen and the rejected answer of each row of ``pair_batch``.

    A packed pass computes the prompt that they share once.
    """

    packing_key = "model.use_remove_padding"

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``chosen_scores`` and ``rejected_scores``, [B] float32 each, uncentred."""
        chosen_B, rejected_B = self.uncentred_scores(as_sequences(batch)).chunk(2)
        return {"chosen_scores": chosen_B, "rejected_scores": rejected_B}


def as_sequences(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """B pairs -> 2 B sequences in the layout of rollouts: the chosen ones, then the rejected ones."""
    width = prompt_width(batch)
    prompts_BP, prompt_mask_BP = batch["input_ids"][:, :width], batch["attention_mask"][:, :width]
    responses = torch.cat([batch["responses"], batch["rejected"]])
    response_mask = torch.cat([batch["response_mask"], batch["rejected_mask"]])
    attention_mask = torch.cat([prompt_mask_BP.repeat(2, 1), response_mask.to(prompt_mask_BP.dtype)], dim=1)
    return {
        "input_ids": torch.cat([prompts_BP.repeat(2, 1), responses], dim=1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(dim=1) - 1).clamp(min=0),
        "response_mask": response_mask,
    }
