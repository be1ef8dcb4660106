"""The forward passes of roles on hidden states that a pipeline of megatron-core's layers has computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from strop.algorithms.output_layer import OutputLayer
from strop.models.base import RoleModel
from strop.models.packing import Packing
from strop.models.policy import PolicyModel
from strop.models.scorer import PairScorer, SequenceScorer, ValueModel


class StagedRole(RoleModel):
    """A role whose Hugging Face model, on the meta device, has names and configuration only."""

    hidden_MH: Tensor
    """Hidden states of the micro-batch, set before each forward pass."""
    head_weight: Callable[[], Tensor]
    """Returns this rank's weight of the head; called on the last stage."""

    def hidden_states_at(
        self, batch: Mapping[str, Tensor], chosen_BL: Tensor, packing: Packing | None
    ) -> Tensor:
        assert packing is not None  # built with packed=True
        return self.hidden_MH[packing.places(chosen_BL)]

    def scalar_head(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.head_weight()).squeeze(-1).float()


class VocabularyShard:
    """Projection of a policy onto this rank's words."""

    def __init__(self, weight: Callable[[], Tensor], first_word: int, group: dist.ProcessGroup) -> None:
        self._weight, self._first_word = weight, first_word
        self._group = group if group.size() > 1 else None

    def current(self) -> OutputLayer:
        return OutputLayer(self._weight(), first_word=self._first_word, group=self._group)


class StagedPolicy(StagedRole, PolicyModel):
    """See ``PolicyModel``."""


class StagedValues(StagedRole, ValueModel):
    """See ``ValueModel``."""


class StagedScorer(StagedRole, SequenceScorer):
    """See ``SequenceScorer``."""


class StagedPairs(StagedRole, PairScorer):
    """See ``PairScorer``."""


ROLES: dict[str, type[StagedRole]] = {
    "policy": StagedPolicy,
    "value": StagedValues,
    "score": StagedScorer,
    "pairs": StagedPairs,
}


def staged(kind: str, model: PreTrainedModel, **options: Any) -> StagedRole:
    """Return the role of a ``kind`` (``ModelSpec.kind``) for a model on the meta device."""
    return ROLES[kind](model, packed=True, **options)
