"""Arguments of forward passes: tokens and their positions, in padded rows or in one packed row.

Every pass of a role and of rollout ``hf`` has them from a ``Reader``, so that a model which reads more than
tokens adds it in one place (``strop.models.vision``).

Shapes: B padded rows of L columns, N computed tokens of the packed row, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeAlias

from torch import Tensor
from transformers import PreTrainedModel

from strop.errors import ModelError
from strop.models.heads import decoder_of

Features: TypeAlias = Sequence[Tensor | Sequence[Tensor]]
"""By layer: the encoder's features [tokens, H] of a picture, or of each of its parts."""


@dataclass(frozen=True)
class PassInputs:
    """Columns of tokens [B, L] of padded rows, or [1, N] of a packed row."""

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor | dict[str, Tensor] | None
    """None in a packed row, whose attention takes lengths; of each kind of layers where there is a cache."""

    seen_together: Tensor | None = field(default=None, kw_only=True)
    """Number [B, K] of the picture of each real token whose tokens attend to each other, 0 for others."""

    def packed(self, pack: Callable[[Tensor], Tensor]) -> Self:
        """Return the same in the row that ``pack`` makes of a column [B, L]."""
        ids, positions = pack(self.input_ids), pack(self.position_ids)
        return replace(self, input_ids=ids, position_ids=positions, attention_mask=None)

    @property
    def last_position(self) -> Tensor:
        """The largest position [B] of a row, after which its next token is; of padded rows."""
        return self.position_ids.amax(dim=-1)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the family's forward pass."""
        names = ("input_ids", "attention_mask", "position_ids")
        return {name: getattr(self, name) for name in names}

    def around(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """Return the context that the pass runs in."""
        del model
        return nullcontext()

    def hidden_states(self, model: PreTrainedModel, **options: Any) -> Tensor:
        """Return the last hidden states [B, L, H] or [1, N, H] of one pass, without a cache."""
        with self.around(model):
            outputs = decoder_of(model)(**self.arguments(), use_cache=False, **options)
        return outputs.last_hidden_state


class Reader:
    """Make the inputs of a model of text."""

    def inputs(
        self,
        batch: Mapping[str, Tensor],
        computed_BL: Tensor | None = None,
        encoded: dict[int, Features] | None = None,
    ) -> PassInputs:
        """Return the inputs of a pass over padded rows; ``computed_BL``: those computed, if not all.

        ``encoded``: features of pictures by digest, of earlier passes with these weights; gets new ones.
        """
        del computed_BL, encoded
        if "images" in batch or "images_at" in batch:
            raise ModelError(
                "a batch has pictures (the column images), and the model was loaded to read text: call "
                "set_pictures of its group before init_model, as strop does for a data set with pictures"
            )
        return PassInputs(batch["input_ids"], batch["position_ids"], batch["attention_mask"])

    def own(self, batch: Mapping[str, Tensor], ids_BL: Tensor) -> dict[str, Any]:
        """Return the arguments of the family's forward pass over ``ids_BL``: rows padded on the right."""
        del batch
        return {"input_ids": ids_BL}
