"""``PairPolicy``: log-probs of both answers of a pair, in one pass.

Shapes: B pairs, T tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from strop.models.policy import PolicyModel
from strop.models.scorer import as_sequences


class PairPolicy(PolicyModel):
    """A causal LM that returns the log-prob of whole answers; a packed pass computes their prompt once."""

    def sequences(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return both sequences of each row; see ``as_sequences``."""
        return as_sequences(batch)

    def forward(self, batch: Mapping[str, Tensor], **options: Any) -> dict[str, Tensor]:
        """Return ``chosen_log_prob`` and ``rejected_log_prob``, [B] float32 each, 0 for an empty answer."""
        options = {"with_entropy": False, **options}
        log_prob_BT = super().forward(self.sequences(batch), **options)["log_prob"]
        # as_sequences puts the B chosen answers before the B rejected ones
        chosen_B, rejected_B = log_prob_BT.sum(dim=1).chunk(2)
        return {"chosen_log_prob": chosen_B, "rejected_log_prob": rejected_B}

    def figures(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the log-probs [B, T] of the tokens of single answers, by a policy's pass."""
        return super().forward(batch, with_entropy=False)["log_prob"]
