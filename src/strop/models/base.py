"""``RoleModel``: the base class of a role's forward pass, around a Hugging Face model.

``ResponseTokens`` selects the hidden states that predict response tokens, and spreads results back to [B, T].

Shapes: B sequences, P prompt tokens, T response tokens, L = P + T, n chosen tokens, H hidden.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from strop import ranks
from strop.errors import ModelError, raised_as
from strop.models.attention import is_flash, packed_attention
from strop.models.checkpoint_layout import CheckpointLayout
from strop.models.heads import check_causal, model_errors
from strop.models.inputs import Reader
from strop.models.lora import Adapters, LoraSettings
from strop.models.packing import (
    Packing,
    PackingError,
    check_packable,
    check_packed_pass,
    packed_hidden_states,
)
from strop.models.passes.compiled import CompiledLayers
from strop.models.passes.micro_batch import on_cpu, places_of, send
from strop.models.passes.rms_norm import replace_rms_norms
from strop.models.prompts_once import PromptsOnce
from strop.models.routing import Routers, experts_of
from strop.models.selective import KeptResults
from strop.models.transformers_private import attention_name
from strop.models.tree import leaves_of
from strop.models.ulysses import SequenceGroup, check_shareable

logger = logging.getLogger(__name__)


class RoleModel(nn.Module):
    """Hugging Face model of a role; subclasses define ``forward(batch, **options) -> dict[str, Tensor]``."""

    packing_key: str = "actor_rollout_ref.model.use_remove_padding"
    """Configuration key of ``packed``, for errors."""
    causal: bool = True
    """True if tokens must not depend on later ones; packed passes need that in any case."""
    with_last: bool = False
    """True if the figures need the hidden state of a sequence's last token."""
    hugging_face_model: PreTrainedModel
    """Exported, and used by a rollout that shares the weights."""
    layout: CheckpointLayout
    """Names and shapes of its weights in an export."""
    packed: bool
    """True if passes run on the real tokens alone; batches and outputs are padded either way."""

    def __init__(
        self,
        hugging_face_model: PreTrainedModel,
        *,
        packed: Literal["auto"] | bool = False,
        packing_key: str | None = None,
    ) -> None:
        """Wrap and check the model; one on the meta device is checked by ``check`` once it has weights.

        Raises ``ModelError`` if ``packed`` is True and the model does not support it; with "auto" passes are
        padded then.
        """
        super().__init__()
        self.hugging_face_model = hugging_face_model
        replace_rms_norms(hugging_face_model)
        self.layout = CheckpointLayout(hugging_face_model)
        self.packed = bool(packed)  # "auto" too, until a check refuses packed passes
        self._may_pad, self._why_padded = packed == "auto", ""
        self.packing_key = packing_key or self.packing_key
        self.sequence_group: SequenceGroup | None = None
        self.reader = Reader()
        self.adapters: Adapters | None = None
        self.compiled: CompiledLayers | None = None
        self.kept_results: KeptResults | None = None
        """Of selective checkpointing."""
        self.routers = Routers.of(hugging_face_model)
        """Routers with an auxiliary loss; None if the model has none."""
        if packed:
            with self._padded_if_refused():
                check_packable(hugging_face_model)
        if not next(hugging_face_model.parameters()).is_meta:
            RoleModel.check(self)

    def trainable(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that the optimizer updates."""
        return (parameter for parameter in self.parameters() if parameter.requires_grad)

    def export_weights(self, whole: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of an export or a transfer by Hugging Face name, tied ones once, LoRA merged in.

        ``whole`` gathers a sharded parameter. Collective if the model is sharded.
        """
        weights = self.hugging_face_model.named_parameters()
        if self.adapters is not None:
            yield from self.adapters.merged(weights, whole)
            return
        for name, weight in weights:
            yield name, whole(weight)

    def adapt(self, settings: LoraSettings) -> Adapters:
        """Put LoRA adapters into the model; they and ``modules_to_save`` alone are trained and saved."""
        self.adapters = Adapters(self.hugging_face_model, settings)
        return self.adapters

    def saved_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of a training state by their names in this module, tied ones once."""
        prefix = "hugging_face_model."
        for name, parameter in self.named_parameters():
            if self.adapters is None or self.adapters.is_trained(name.removeprefix(prefix)):
                yield name, parameter

    def check(self, *, sharded: bool = False) -> None:
        """Raise ``ModelError`` if the wrapper does not fit the model; needs its weights.

        Collective if the model is ``sharded``.
        """
        model = self.hugging_face_model
        if self.causal:
            with model_errors(model):
                check_causal(model)
        if self.packed:
            with self._padded_if_refused(), model_errors(model):
                if not self.causal:
                    check_causal(model)
                check_packed_pass(model, self.sequence_group, sharded=sharded)

    @contextmanager
    def _padded_if_refused(self) -> Generator[None]:
        try:
            yield
        except PackingError as error:
            key, group = self.packing_key, self.sequence_group
            if group is not None:
                setting = f"ulysses_sequence_parallel_size={group.size}"
                raise ModelError(f"{setting}: {error}; set it to 1") from error
            if not self.pad(error):
                raise ModelError(f"{key}=True: {error}; set {key}=False") from error
        except ModelError as error:
            if not self.pad(error):
                raise

    def pad(self, reason: object) -> bool:
        """Switch to padded passes and log the reason; return False if ``packed`` was not "auto"."""
        if self._may_pad and self.packed:
            self.packed, self._why_padded = False, str(reason)
            if ranks.is_first():
                logger.warning("%s=auto: passes are padded, which takes longer: %s", self.packing_key, reason)
            return True
        return False

    def share_sequences(self, group: SequenceGroup) -> None:
        """Run passes jointly on the ranks of ``group``, which must get the same batches.

        Outputs are whole on every rank. Raises ``ModelError`` if passes are not packed or the model does not
        support it; ``check`` compares its results with an unshared pass.
        """
        if not self.packed:
            remedy = (
                f"{self._why_padded}; set it to 1" if self._why_padded else f"set {self.packing_key}=True"
            )
            raise ModelError(f"ulysses_sequence_parallel_size={group.size} shares packed rows; {remedy}")
        check_shareable(self.hugging_face_model, group.size)
        # ranks hold pieces of a packed row: there is no padded pass to switch to
        self.sequence_group, self._may_pad = group, False

    def enable_gradient_checkpointing(self, *, selective: bool = False) -> None:
        """Keep only the inputs of layers, and recompute the layers in the backward pass.

        If ``selective``, keep results of matrix products and of attention too, and recompute the rest; a
        forward pass under ``kept_results.trial()`` must come before the first one with gradients.

        Raises ``ModelError`` if the family does not support it.
        """
        self.kept_results = KeptResults() if selective else None

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[None]]:
            kept = self.kept_results
            forward, again = (nullcontext(), nullcontext()) if kept is None else kept.contexts()
            return forward, self._recomputing(again)

        # reentrant checkpointing takes no context_fn, and gives frozen inputs (LoRA) no gradient
        options = {"use_reentrant": False, "context_fn": contexts}
        key = f"{self.packing_key.removesuffix('use_remove_padding')}enable_gradient_checkpointing"
        with raised_as(ModelError, f"{key}: set it to False", ValueError):
            self.hugging_face_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)

    @contextmanager
    def _recomputing(self, inner: AbstractContextManager[Any]) -> Generator[None]:
        """Set in the body what a forward pass has restored at its end, and enter ``inner``."""
        with ExitStack() as stack:
            stack.enter_context(inner)
            if self.packed:
                stack.enter_context(packed_attention(self.hugging_face_model, self.sequence_group))
            if self.compiled is not None:
                stack.enter_context(self.compiled.on())
            yield

    def compile_layers(self) -> None:
        """Compile the decoder layers for this module's passes; call it before sharding.

        Raises ``ModelError`` for mixtures of experts, whose routers are watched from outside.
        """
        if self.is_mixture:
            raise ModelError(
                f"compile=True: {type(self.hugging_face_model).__name__} is a mixture of experts, which is "
                "not compiled; set it to auto or False"
            )
        self.compiled = CompiledLayers(self.hugging_face_model)

    @property
    def is_mixture(self) -> bool:
        """True if the model has routed experts, also without an auxiliary loss."""
        return experts_of(self.hugging_face_model.config.get_text_config()) > 0

    def sequences(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the sequences that a pass over ``batch`` computes: by default one for each row or leaf."""
        leaves = leaves_of(batch)
        return batch if leaves is None else leaves.sequences

    def packing(self, batch: Mapping[str, Tensor]) -> Packing | None:
        """Return the packing of these sequences; None for a padded pass."""
        if not self.packed:
            return None
        # flash-attention attends to the row as it is laid out; a shared prompt would need copies in it
        by_sequence = not is_flash(attention_name(self.hugging_face_model.config))
        if by_sequence and self.sequence_group is None and "response_mask" in batch:
            return PromptsOnce.of(batch, with_last=self.with_last)
        mask_BL, device = on_cpu(batch, "attention_mask"), batch["input_ids"].device
        return Packing(mask_BL, device, self.sequence_group)

    def figures(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return what a pass computes, as it runs: [B, T] or [B] float32; see ``strop.models.comparison``."""
        raise NotImplementedError

    def own_figures(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the same from the Hugging Face model's forward pass, on rows without padding in front."""
        raise NotImplementedError

    def hidden_states_at(
        self, batch: Mapping[str, Tensor], chosen_BL: Tensor, packing: Packing | None
    ) -> Tensor:
        """Return the last hidden states [n, H] of the tokens where ``chosen_BL`` is True, row by row.

        ``chosen_BL`` is on the CPU. The result is undefined for tokens that another rank holds.
        """
        watching = nullcontext() if self.routers is None else self.routers.watching(batch, packing)
        with watching, nullcontext() if self.compiled is None else self.compiled.on():
            if packing is None:
                hidden = self.reader.inputs(batch).hidden_states(self.hugging_face_model).flatten(0, 1)
                return hidden.index_select(0, places_of(chosen_BL, hidden.device))
            inputs = self.reader.inputs(batch, packing.computed_BL)
            hidden = packed_hidden_states(self.hugging_face_model, inputs, packing)
            return hidden.index_select(0, packing.places(chosen_BL))

    def scalar_head(self, hidden: Tensor) -> Tensor:
        """Return the scalar head's float32 figure [...] of hidden states [..., H]."""
        return self.hugging_face_model.get_submodule("score")(hidden).squeeze(-1).float()

    def own_scores(self, batch: Mapping[str, Tensor], ids_BL: Tensor) -> Tensor:
        """Return the scalar head's figure [B, L] at every token, by the family's own forward pass."""
        own = self.reader.own(batch, ids_BL)
        hidden = self.hugging_face_model.base_model(**own, use_cache=False).last_hidden_state
        return RoleModel.scalar_head(self, hidden)  # a stage of a pipeline may have no head

    def whole(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sum the outputs over the ranks that share the batch; each has zeros for tokens of other ranks."""
        if self.sequence_group is None:
            return outputs
        return {name: self.sequence_group.sum_of_parts(output) for name, output in outputs.items()}


class ResponseTokens:
    """The n response tokens of a micro-batch that the mask keeps, and the way back to [B, T].

    Where ranks share sequences: the tokens that follow one which this rank holds.
    """

    def __init__(self, batch: Mapping[str, Tensor], packing: Packing | None) -> None:
        kept_BT = on_cpu(batch, "response_mask").bool()
        width, response_width = batch["input_ids"].shape[1], kept_BT.shape[1]
        # response token t is predicted at column P + t - 1
        first = width - response_width - 1
        if packing is not None:
            kept_BT = kept_BT & packing.own_BL[:, first:-1]
        self._none = not kept_BT.any()
        if self._none:  # the pass must still reach every parameter: other ranks wait for it
            kept_BT = torch.zeros_like(kept_BT)
            kept_BT[0, 0] = True
        self.before_BL = nn.functional.pad(kept_BT, (first, 1))
        """The tokens before them, on the CPU."""
        self._shape = kept_BT.shape
        # on the CPU: nonzero of a tensor on a GPU would wait for the passes queued there
        self._index = tuple(send(place_n, batch["input_ids"].device) for place_n in kept_BT.nonzero().t())

    def select(self, column: Tensor) -> Tensor:
        """Return the entries [n, ...] of a column [B, T, ...]."""
        return column[*self._index]

    def spread(self, values: Tensor) -> Tensor:
        """Scatter [n, ...] to [B, T, ...], 0 where the mask is 0."""
        zeros = values.new_zeros(*self._shape, *values.shape[1:])
        spread = zeros.index_put(self._index, values)  # no view, whose hooks FSDP2 may lose
        # a product keeps the graph to every parameter, which an empty result would cut
        return spread * 0.0 if self._none else spread


class Unpadded:
    """Rows with their padding behind the tokens, where no token of a causal model attends to it.

    So the model needs neither a mask nor positions: a reference for passes that pass both.
    """

    def __init__(self, batch: Mapping[str, Tensor]) -> None:
        mask_BL = batch["attention_mask"].bool()
        # a stable sort keeps the tokens' order while it moves padding behind them
        tokens_first_BL = (~mask_BL).byte().argsort(dim=1, stable=True)
        self.ids_BL = batch["input_ids"].gather(1, tokens_first_BL)
        width = mask_BL.shape[1] - batch["response_mask"].shape[1]
        steps_T = torch.arange(batch["response_mask"].shape[1], device=mask_BL.device)
        self.before_BT = mask_BL[:, :width].sum(dim=1, keepdim=True) - 1 + steps_T
        """Place of the token before each response token."""
        self.last_B = mask_BL.sum(dim=1) - 1
        """Place of the last token."""
