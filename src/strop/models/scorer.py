"""Models with a scalar head: ``ValueModel`` (critic), ``SequenceScorer`` (reward model), ``PairScorer``.

All are Hugging Face sequence-classification models with one label: a critic can start from a reward model,
and an exported critic loads with ``AutoModelForSequenceClassification``. ``strop.models.heads`` defines the
class of families for which transformers has none. ``PairScorer`` is a reward model in
training, which scores both answers to a prompt in one pass.

Shapes: B rows, P prompt tokens, T response tokens, L = P + T, n chosen tokens (N of a
value model), H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from strop.models.base import ResponseTokens, RoleModel, Unpadded
from strop.models.passes.micro_batch import MicroBatch, on_cpu, places_of
from strop.models.prompts_once import prompt_width
from strop.models.tree import by_leaf
from strop.protocol import sequence_columns

REWARD_MEAN, REWARD_STD = "strop_reward_mean", "strop_reward_std"
"""Entries of a reward model's config.json: mean and standard deviation of its scores on held-out pairs."""


class ValueModel(RoleModel):
    """V(s_t) before every response token.

    The mean score of a reward model that it starts from is dropped: values have another mean.
    """

    packing_key = "critic.model.use_remove_padding"

    def __init__(self, hugging_face_model: PreTrainedModel, **options: Any) -> None:
        super().__init__(hugging_face_model, **options)
        for name in (REWARD_MEAN, REWARD_STD):
            vars(hugging_face_model.config).pop(name, None)

    @by_leaf
    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``values`` [B, T] float32, 0 where ``response_mask`` is 0.

        The value at response position t is of the state before token t: the hidden state at P + t - 1.
        """
        packing = self.packing(batch)
        tokens = ResponseTokens(batch, packing)
        hidden_NH = self.hidden_states_at(batch, tokens.before_BL, packing)
        values_N = self.scalar_head(hidden_NH)
        return self.whole({"values": tokens.spread(values_N)})

    def figures(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the values [B, T]."""
        return self.forward(batch)["values"]

    def own_figures(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the values [B, T] by the model's hidden states."""
        rows = Unpadded(batch)
        return self.own_scores(batch, rows.ids_BL).gather(1, rows.before_BT) * batch["response_mask"]


class SequenceScorer(RoleModel):
    """A reward model: one score for a whole sequence, read at its last real token.

    The head has no bias, and preferences do not fix the zero of a score. So the mean is subtracted if the
    model's configuration has it.
    """

    causal = False
    with_last = True

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``rm_scores`` [B] float32."""
        mean = getattr(self.hugging_face_model.config, REWARD_MEAN, 0.0)
        return {"rm_scores": self.uncentred_scores(batch) - mean}

    def uncentred_scores(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the head's scores [B] float32. The mask marks the last token, never the pad id."""
        mask_BL = on_cpu(batch, "attention_mask").bool()
        positions_BL = torch.arange(mask_BL.shape[1]).expand_as(mask_BL)
        # not sum - 1: rows have padding on the left, before the prompt
        last_B = torch.where(mask_BL, positions_BL, 0).amax(dim=1)
        is_last_BL, packing = positions_BL == last_B[:, None], self.packing(batch)
        if packing is not None:
            is_last_BL &= packing.own_BL
        hidden_nH = self.hidden_states_at(batch, is_last_BL, packing)
        scores_n = self.scalar_head(hidden_nH)
        # with shared sequences this rank holds the last token of some rows only
        rows_n = places_of(is_last_BL.any(dim=1), scores_n.device)
        scores_B = scores_n.new_zeros(len(mask_BL)).index_copy(0, rows_n, scores_n)
        return self.whole({"scores": scores_B})["scores"]

    def figures(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the scores [B]."""
        return self.uncentred_scores(batch)

    def own_figures(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the scores [B] by the model's hidden states."""
        rows = Unpadded(batch)
        return self.own_scores(batch, rows.ids_BL).gather(1, rows.last_B[:, None])[:, 0]


class PairScorer(SequenceScorer):
    """Score the chosen and the rejected answer of each row; a packed pass computes their prompt once."""

    def sequences(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return both sequences of each row; see ``as_sequences``."""
        return as_sequences(batch)

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``chosen_scores`` and ``rejected_scores``, [B] float32 each, uncentred."""
        # the order of as_sequences
        chosen_B, rejected_B = self.uncentred_scores(self.sequences(batch)).chunk(2)
        return {"chosen_scores": chosen_B, "rejected_scores": rejected_B}


def as_sequences(batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Convert B pairs to 2 B sequences in the layout of rollouts: the chosen ones, then the rejected ones."""
    if isinstance(batch, MicroBatch):
        return batch.converted(as_sequences)
    width = prompt_width(batch)
    prompts_BP, prompt_mask_BP = batch["input_ids"][:, :width], batch["attention_mask"][:, :width]
    responses = torch.cat([batch["responses"], batch["rejected"]])
    response_mask = torch.cat([batch["response_mask"], batch["rejected_mask"]])
    attention_mask = torch.cat([prompt_mask_BP.repeat(2, 1), response_mask.to(prompt_mask_BP.dtype)], dim=1)
    images = {"images": batch["images"].repeat(2, 1)} if "images" in batch else {}
    return {
        **images,
        **sequence_columns(torch.cat([prompts_BP.repeat(2, 1), responses], dim=1), attention_mask),
        "responses": responses,
        "response_mask": response_mask,
    }
