"""Models with a scalar head: the critic (a value at every response token) and the reward model (one score).

Both are Hugging Face sequence-classification models with one label, so a critic can start from a reward
model, and an exported critic loads with ``AutoModelForSequenceClassification``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from strop.models.base import RoleModel, hidden_states


class ValueModel(RoleModel):
    """V(s_t) before every response token."""

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``values`` [B, T] float32, 0 where ``response_mask`` is 0.

        The value at response position t is the state before token t: the hidden state at position P + t - 1.
        """
        mask_BT = batch["response_mask"].bool()
        prompt_width = batch["input_ids"].shape[1] - mask_BT.shape[1]
        hidden_BTH = hidden_states(self.hugging_face_model, batch)[:, prompt_width - 1 : -1]
        values_BT = self.hugging_face_model.get_submodule("score")(hidden_BTH).squeeze(-1).float()
        return {"values": torch.where(mask_BT, values_BT, 0.0)}


class SequenceScorer(RoleModel):
    """A reward model: one score for a whole sequence, read at its last real token."""

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``rm_scores`` [B] float32. The last token is found by the attention mask, never by the pad id."""
        mask_BL = batch["attention_mask"].bool()
        positions_BL = torch.arange(mask_BL.shape[1], device=mask_BL.device).expand_as(mask_BL)
        last_B = torch.where(mask_BL, positions_BL, 0).amax(dim=1)
        hidden_BLH = hidden_states(self.hugging_face_model, batch)
        rows_B = torch.arange(len(last_B), device=last_B.device)
        return {
            "rm_scores": self.hugging_face_model.get_submodule("score")(hidden_BLH[rows_B, last_B])
            .squeeze(-1)
            .float()
        }
