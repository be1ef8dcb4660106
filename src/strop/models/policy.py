"""The policy: log-probs and entropies of response tokens, without ever holding [B, T, V] logits.

Shapes: B sequences, P prompt tokens, T response tokens, L = P + T, N response tokens that the mask keeps,
H hidden, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from strop.algorithms.logprobs import token_log_probs
from strop.errors import ModelError
from strop.models.base import RoleModel, hidden_states

Projection = Callable[[Tensor], Tensor]
_CHUNK = 256  # tokens whose logits exist at once: at 49k words 1.0 GB at the peak, against 1.65 GB for 1024


def logit_projection(config: PretrainedConfig, head: nn.Module) -> Projection:
    """The map from hidden states [..., H] to logits [..., V], with the model family's scaling or soft cap."""
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2 and 3
    multiplier = getattr(config, "logit_scale", None)  # Cohere
    divisor = getattr(config, "logits_scaling", None)  # Granite

    def project(hidden: Tensor) -> Tensor:
        logits = head(hidden)
        if multiplier is not None:
            logits = logits * multiplier
        if divisor is not None:
            logits = logits / divisor
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    return project


@torch.no_grad()
def check_projection(model: PreTrainedModel, project: Projection) -> None:
    """Compare our path to the logits with the model's own on four tokens; ``ModelError`` when they differ.

    A family whose forward pass does something else to its logits would otherwise train on wrong log-probs.
    """
    ids = torch.arange(4, device=model.device)[None] % model.config.get_text_config().vocab_size
    own = model(input_ids=ids, use_cache=False).logits.float()
    ours = project(model.base_model(input_ids=ids, use_cache=False).last_hidden_state).float()
    if not torch.allclose(own, ours, atol=1e-3, rtol=1e-3):
        raise ModelError(
            f"{type(model).__name__} changes its logits after the output layer (largest difference "
            f"{(own - ours).abs().max():.3g}); teach strop.models.policy.logit_projection about this family"
        )


class PolicyModel(RoleModel):
    """A causal LM that answers with per-token figures of its responses instead of logits."""

    def __init__(self, language_model: PreTrainedModel) -> None:
        super().__init__(language_model)
        head = language_model.get_output_embeddings()
        if head is None:
            raise ModelError(f"{type(language_model).__name__} has no output embeddings to project with")
        self._project = logit_projection(language_model.config, head)
        check_projection(language_model, self._project)
        self._reference_head: Projection | None = None

    def keep_reference_head(self) -> None:
        """Freeze a copy of today's output layer: the full KL needs the reference's logits."""
        head = copy.deepcopy(self.hugging_face_model.get_output_embeddings()).requires_grad_(False)
        # Held in the closure only: as a sub-module it would be trained, saved and exported.
        self._reference_head = logit_projection(self.hugging_face_model.config, head)

    def forward(
        self,
        batch: Mapping[str, Tensor],
        *,
        temperature: float = 1.0,
        with_entropy: bool = True,
        with_hidden: bool = False,
        with_full_kl: bool = False,
    ) -> dict[str, Tensor]:
        """``log_prob`` [B, T], and on demand ``entropy`` [B, T], ``hidden`` [B, T, H] and ``full_kl`` [B, T].

        The figures are float32, of ``logits / temperature``, and 0 where ``response_mask`` is 0.
        ``full_kl`` is the sum over the vocabulary of p (log p - log ref) and needs the batch column
        ``ref_hidden``.
        """
        mask_BT = batch["response_mask"].bool()
        prompt_width = batch["input_ids"].shape[1] - mask_BT.shape[1]
        hidden_BTH = hidden_states(self.hugging_face_model, batch)[:, prompt_width - 1 : -1]
        reference = None
        if with_full_kl:
            if self._reference_head is None:
                raise ModelError("the full KL needs keep_reference_head() to be called before training")
            reference = (batch["ref_hidden"][mask_BT], self._reference_head)
        found = token_log_probs(
            hidden_BTH[mask_BT],
            self._project,
            batch["responses"][mask_BT],
            temperature=temperature,
            with_entropy=with_entropy,
            chunk_size=_CHUNK,
            ref=reference,
        )

        def unpack(values_N: Tensor) -> Tensor:
            zeros_BT = torch.zeros(mask_BT.shape, dtype=values_N.dtype, device=values_N.device)
            return zeros_BT.masked_scatter(mask_BT, values_N)

        outputs = {"log_prob": unpack(found.log_probs_N)}
        if found.entropy_N is not None:
            outputs["entropy"] = unpack(found.entropy_N)
        if found.full_kl_N is not None:
            outputs["full_kl"] = unpack(found.full_kl_N)
        if with_hidden:
            outputs["hidden"] = hidden_BTH.float() * mask_BT[..., None]
        return outputs
