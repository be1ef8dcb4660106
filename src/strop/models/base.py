"""What every role's model has in common: a Hugging Face model inside, and named tensors out.

Shapes: B sequences, P prompt tokens, T response tokens, L = P + T, n chosen tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from strop.errors import ModelError
from strop.models.attention import packed_attention
from strop.models.packing import Packing, check_packable, check_packed_pass, packed_hidden_states
from strop.models.prompts_once import PromptsOnce
from strop.models.ulysses import SequenceGroup, check_shareable


class RoleModel(nn.Module):
    """Wraps a Hugging Face model; subclasses define ``forward(batch, **options) -> dict[str, Tensor]``."""

    packing_key: ClassVar[str] = "actor_rollout_ref.model.use_remove_padding"
    """The key that asks for packed passes, for errors."""
    hugging_face_model: PreTrainedModel
    """What is exported, and what an in-process rollout generates with."""
    packed: bool
    """Whether passes run on the real tokens alone; batches and outputs are padded either way."""

    def __init__(self, hugging_face_model: PreTrainedModel, *, packed: bool = False) -> None:
        """A model whose weights are still to come (on the meta device) is checked by ``check`` later.

        ``ModelError`` when ``packed`` is asked of a model that cannot do it.
        """
        super().__init__()
        self.hugging_face_model = hugging_face_model
        self.packed = packed
        self.sequence_group: SequenceGroup | None = None
        if packed:
            check_packable(hugging_face_model, self.packing_key)
        if not next(hugging_face_model.parameters()).is_meta:
            RoleModel.check(self)

    def check(self) -> None:
        """``ModelError`` when the wrapper does not fit the model; needs its weights."""
        if self.packed:
            check_packed_pass(self.hugging_face_model, self.packing_key, self.sequence_group)

    def share_sequences(self, group: SequenceGroup) -> None:
        """From now on the ranks of ``group`` get the same batches, and run a pass over them together.

        The outputs are whole on every rank. ``ModelError`` when the passes are not packed, or when the model
        cannot be shared; ``check`` shows whether it computes the same.
        """
        if not self.packed:
            raise ModelError(
                f"ulysses_sequence_parallel_size={group.size} shares packed rows; set {self.packing_key}=True"
            )
        check_shareable(self.hugging_face_model, group.size)
        self.sequence_group = group

    def enable_gradient_checkpointing(self) -> None:
        """Keep the inputs of layers only, and compute the layers again in the backward pass."""
        options: dict[str, Any] = {"use_reentrant": False}
        if self.packed:  # the backward pass runs when the forward pass has put the attention back
            options["context_fn"] = lambda: (
                nullcontext(),
                packed_attention(self.hugging_face_model, self.sequence_group),
            )
        self.hugging_face_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)

    def packing(self, batch: Mapping[str, Tensor], *, with_last: bool = False) -> Packing | None:
        """How this batch is packed; None for a padded pass.

        ``with_last``: the hidden state of a sequence's last token is of use, too.
        """
        if not self.packed:
            return None
        by_sequence = self.hugging_face_model.config._attn_implementation == "sdpa"
        if by_sequence and self.sequence_group is None and "response_mask" in batch:
            return PromptsOnce(batch, with_last=with_last)
        return Packing(batch["attention_mask"], self.sequence_group)

    def hidden_states_at(
        self, batch: Mapping[str, Tensor], chosen_BL: Tensor, packing: Packing | None
    ) -> Tensor:
        """The last hidden states [n, H] of the tokens where ``chosen_BL`` is True, row by row.

        Tokens that another rank has give a hidden state that is not theirs.
        """
        if packing is None:
            return hidden_states(self.hugging_face_model, batch)[chosen_BL]
        return packed_hidden_states(self.hugging_face_model, batch, packing)[packing.places(chosen_BL)]

    def whole(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The outputs of all ranks that share the batch; each has zeros where the tokens are another's."""
        if self.sequence_group is None:
            return outputs
        return {name: self.sequence_group.sum_of_parts(output) for name, output in outputs.items()}


class ResponseTokens:
    """The n response tokens of a micro-batch that the mask keeps, and the way back to [B, T].

    Of those that ranks share, the ones that follow a token which this rank has.
    """

    def __init__(self, batch: Mapping[str, Tensor], packing: Packing | None) -> None:
        self._mask_BT = batch["response_mask"].bool()
        width, response_width = batch["input_ids"].shape[1], self._mask_BT.shape[1]
        # response token t is foretold at column P + t - 1
        first = width - response_width - 1
        if packing is not None:
            self._mask_BT = self._mask_BT & packing.own_BL[:, first:-1]
        self.kept_BT = self._mask_BT
        if not self._mask_BT.any():  # the pass must reach every parameter still: other ranks wait for it
            self.kept_BT = torch.zeros_like(self._mask_BT)
            self.kept_BT[0, 0] = True
        self.before_BL = nn.functional.pad(self.kept_BT, (first, 1))

    def spread(self, values: Tensor) -> Tensor:
        """[n, ...] -> [B, T, ...], 0 where the mask is 0."""
        more = (1,) * (values.dim() - 1)
        kept, mask = (rows_BT.view(*rows_BT.shape, *more) for rows_BT in (self.kept_BT, self._mask_BT))
        zeros = values.new_zeros(*self._mask_BT.shape, *values.shape[1:])
        spread = zeros.masked_scatter(kept, values)
        return spread if self.kept_BT is self._mask_BT else spread * mask


def hidden_states(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Tensor:
    """The last hidden states [B, L, H]; one forward pass of the decoder without a cache."""
    return model.base_model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        position_ids=batch["position_ids"],
        use_cache=False,
    ).last_hidden_state
