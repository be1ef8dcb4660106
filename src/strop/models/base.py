"""What every role's model has in common: a Hugging Face model inside, and named tensors out."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from transformers import PreTrainedModel


class RoleModel(nn.Module):
    """Wraps a Hugging Face model; subclasses define ``forward(batch, **options) -> dict[str, Tensor]``."""

    def __init__(self, hugging_face_model: PreTrainedModel) -> None:
        super().__init__()
        self.hugging_face_model = hugging_face_model

    def check(self) -> None:
        """``ModelError`` when the wrapper does not fit the model; needs its weights."""

    hugging_face_model: PreTrainedModel
    """What is exported, and what an in-process rollout generates with."""


def hidden_states(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Tensor:
    """The last hidden states [B, L, H]; one forward pass of the decoder without a cache."""
    return model.base_model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        position_ids=batch["position_ids"],
        use_cache=False,
    ).last_hidden_state
