"""``PolicyModel``: log-probs and entropies of response tokens, without [B, T, V] logits in memory.

Shapes: B sequences, P prompt tokens, T response tokens, L = P + T, N response tokens that the mask keeps,
H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from transformers import PretrainedConfig, PreTrainedModel

from strop.algorithms.distillation import cut, top_words
from strop.algorithms.logprobs import token_log_probs
from strop.algorithms.output_layer import OutputLayer
from strop.columns import TEACHER_COLUMNS
from strop.errors import ModelError
from strop.models.attention import portable_attention
from strop.models.base import ResponseTokens, RoleModel, Unpadded
from strop.models.heads import decoder_of, model_errors, projection_of, require_numbers
from strop.models.teaching import Teaching, as_layer
from strop.models.tree import by_leaf
from strop.torch_private import has_forward_hooks

Projection = Callable[[Tensor], Tensor]
_CHUNK = 256  # tokens whose logits are in memory at once if the head is more than a matrix


class LogitProjection:
    """Map hidden states [..., H] to logits [..., V], with the model family's scaling or soft cap."""

    def __init__(self, config: PretrainedConfig, head: Projection) -> None:
        self._head = head
        self._scale, self._soft_cap = projection_of(config)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states, through the head module."""
        logits = self._head(hidden)
        if self._scale != 1.0:
            logits = logits * self._scale
        return logits if self._soft_cap is None else torch.tanh(logits / self._soft_cap) * self._soft_cap

    def current(self) -> Projection:
        """Return this projection with the head's current weights: an ``OutputLayer`` if it is a plain matrix.

        Call it in a forward pass: a sharded model has its whole weights only there.
        """
        head = self._head
        # a subclass or a hook (an adapter, quantization) may compute anything: then the module itself runs
        if type(head) is not nn.Linear or has_forward_hooks(head):
            return self
        # sharded and outside of the forward pass, in which FSDP2 gathers it
        if isinstance(head.weight, DTensor):
            return self
        return OutputLayer(head.weight, head.bias, self._scale, self._soft_cap)


@torch.no_grad()
def check_projection(model: PreTrainedModel, project: Projection) -> None:
    """Raise ``ModelError`` if ``project`` gives other logits than the model's forward pass on four tokens.

    A family that transforms its logits in another way would otherwise train on wrong log-probs.
    """
    ids = torch.arange(4, device=model.device)[None] % model.config.get_text_config().vocab_size
    with portable_attention(model):
        own = model(input_ids=ids, use_cache=False).logits.float()
        require_numbers(model, own)
        ours = project(decoder_of(model)(input_ids=ids, use_cache=False).last_hidden_state).float()
    if not torch.allclose(own, ours, atol=1e-3, rtol=1e-3):
        raise ModelError(
            f"{type(model).__name__} computes other logits than its output layer does from the decoder's "
            f"hidden states (largest difference {(own - ours).abs().max():.3g}): layers or scaling are "
            "between the two, so this family is not supported as a policy. A scaling or cap that an entry of "
            "config.json gives can be added to strop.models.policy"
        )


class PolicyModel(RoleModel):
    """A causal LM that returns per-token figures of its responses instead of logits."""

    def __init__(self, language_model: PreTrainedModel, **options: Any) -> None:
        """See ``RoleModel``."""
        super().__init__(language_model, **options)
        head = language_model.get_output_embeddings()
        if head is None:
            raise ModelError(f"{type(language_model).__name__} has no output embeddings to project with")
        self.projection: Any = LogitProjection(language_model.config, head)
        self._reference_head: dict[str, Tensor] | None = None
        self.teaching: Teaching | None = None
        self.teacher_heads: list[OutputLayer] = []
        if not head.weight.is_meta:
            with model_errors(language_model):
                check_projection(language_model, self.projection)

    def check(self, *, sharded: bool = False) -> None:
        """Raise ``ModelError`` if the log-probs would not be those of the model's logits."""
        super().check(sharded=sharded)
        with model_errors(self.hugging_face_model):
            check_projection(self.hugging_face_model, self.projection)

    def figures(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the log-probs [B, T] of the response tokens."""
        return self.forward(batch, with_entropy=False)["log_prob"]

    def own_figures(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the log-probs [B, T] by the model's logits."""
        rows = Unpadded(batch)
        own = self.reader.own(batch, rows.ids_BL)
        logits_BLV = self.hugging_face_model(**own, use_cache=False).logits
        log_probs_BTV = logits_BLV.take_along_dim(rows.before_BT[..., None], 1).float().log_softmax(-1)
        log_prob_BT = log_probs_BTV.gather(2, batch["responses"][..., None])[..., 0]
        return log_prob_BT * batch["response_mask"]

    def keep_reference_head(self) -> None:
        """Copy the current output layer: the full KL needs the reference's logits."""
        head = self.hugging_face_model.get_output_embeddings()
        # A plain dictionary: a sub-module would be trained, saved and exported.
        self._reference_head = {name: weight.detach().clone() for name, weight in head.named_parameters()}

    def _reference_projection(self) -> Projection:
        head, whole = self.hugging_face_model.get_output_embeddings(), self._whole_reference_head()
        dtype = next(head.parameters()).dtype

        def frozen(hidden: Tensor) -> Tensor:
            weights = {name: weight.to(dtype) for name, weight in whole.items()}
            return functional_call(head, weights, hidden.to(dtype))

        return LogitProjection(self.hugging_face_model.config, frozen)

    def _whole_reference_head(self) -> dict[str, Tensor]:
        if self._reference_head is None:
            raise ModelError("the full KL needs keep_reference_head() to be called before training")
        # The copy of a sharded model is sharded: gather it once per pass, for all chunks of tokens.
        return {
            name: weight.full_tensor() if isinstance(weight, DTensor) else weight
            for name, weight in self._reference_head.items()
        }

    def _teacher_layers(self) -> list[OutputLayer]:
        """Return the teachers' output layers: read from their folders, or the policy's own as loaded."""
        if self.teacher_heads:
            return self.teacher_heads
        whole = self._whole_reference_head()
        projection = projection_of(self.hugging_face_model.config)
        return [OutputLayer(whole["weight"], whole.get("bias"), *projection)]

    @by_leaf
    def forward(
        self,
        batch: Mapping[str, Tensor],
        *,
        temperature: float = 1.0,
        with_entropy: bool = True,
        with_hidden: bool = False,
        with_full_kl: bool = False,
        with_teacher: bool = False,
        words: int | None = None,
        top_k: int | None = None,
    ) -> dict[str, Tensor]:
        """Return ``log_prob`` [B, T], and on request ``entropy``, ``full_kl`` [B, T], ``hidden`` [B, T, H].

        All are float32, of ``logits / temperature``, and 0 where ``response_mask`` is 0. ``full_kl`` is the
        sum over the vocabulary of p (log p - log ref); it needs the batch column ``ref_hidden``.
        ``with_teacher``: see ``Teaching.measure``. ``words`` cuts the output layer; the log-prob of an id
        beyond them is 0. ``top_k`` adds ``top_ids`` [B, T, K] and ``top`` [B, T, K + 1] of ``top_words``.
        """
        packing = self.packing(batch)
        tokens = ResponseTokens(batch, packing)
        hidden_NH = self.hidden_states_at(batch, tokens.before_BL, packing)
        layer, reference = self.projection.current(), None
        ids_N = tokens.select(batch["responses"])
        if words is not None:
            layer, ids_N = cut(layer, words), ids_N.clamp(max=words - 1)
        if with_full_kl:
            reference = (tokens.select(batch["ref_hidden"]), self._reference_projection())
        found = token_log_probs(
            hidden_NH,
            layer,
            ids_N,
            temperature=temperature,
            with_entropy=with_entropy,
            chunk_size=_CHUNK,
            ref=reference,
        )
        outputs = {"log_prob": tokens.spread(found.log_probs_N)}
        if words is not None:
            outputs["log_prob"] = outputs["log_prob"] * (batch["responses"] < words)
        if found.entropy_N is not None:
            outputs["entropy"] = tokens.spread(found.entropy_N)
        if found.full_kl_N is not None:
            outputs["full_kl"] = tokens.spread(found.full_kl_N)
        if with_teacher and self.teaching is not None:
            columns = {name: tokens.select(batch[name]) for name in TEACHER_COLUMNS if name in batch}
            heads = self._teacher_layers() if "teacher_hidden" in columns else []
            measured = self.teaching.measure(hidden_NH, layer, columns, heads, temperature)
            outputs |= {name: tokens.spread(figure_N) for name, figure_N in measured.items()}
        if top_k is not None:
            ids_NK, top_NK = top_words(hidden_NH, as_layer(layer), top_k, temperature=temperature)
            # float32 holds every id exactly, and ranks that share sequences sum outputs
            outputs |= {"top_ids": tokens.spread(ids_NK.float()), "top": tokens.spread(top_NK)}
        if with_hidden:
            outputs["hidden"] = tokens.spread(hidden_NH.float())
        return self.whole(outputs)
