"""Comparison of a policy with its teacher in the policy's passes: the divergence of each response token.

Shapes: N tokens, H hidden, K words, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from strop.algorithms.distillation import chosen_log_probs, compare, cut, divergence
from strop.algorithms.output_layer import OutputLayer
from strop.errors import ModelError
from strop.models.deferred import defer_causal_lm
from strop.models.heads import projection_of


@dataclass(frozen=True, kw_only=True)
class Teaching:
    """Divergence of a policy from its teacher."""

    kind: str
    js_weight: float
    words: int
    """Words of the tokenizer: heads are cut to them, as models pad theirs."""
    models: Sequence[Mapping[str, Any]] = ()
    """Loader arguments of the teachers whose output layers are read; (): the policy's own, or none."""

    def measure(
        self,
        hidden_NH: Tensor,
        layer: Any,
        found: Mapping[str, Tensor],
        heads: Sequence[OutputLayer],
        temperature: float,
    ) -> dict[str, Tensor]:
        """Return ``teacher_kl`` and ``teacher_agrees`` [N]; ``found`` has columns of
        ``strop.columns.TEACHER_COLUMNS``.

        ``heads`` are the output layers of the teachers, which the column ``teacher`` numbers.
        """
        layer = cut(as_layer(layer), self.words)
        if "teacher_ids" in found:
            ids_NK = found["teacher_ids"].long()
            student, best_N = chosen_log_probs(hidden_NH, layer, ids_NK, temperature=temperature)
            kl_N = divergence(found["teacher_top"], student, self.kind, self.js_weight)
            return {"teacher_kl": kl_N, "teacher_agrees": (best_N == ids_NK[:, 0]).float()}
        states_NH, figures_2N = found["teacher_hidden"], hidden_NH.new_zeros(2, len(hidden_NH)).float()
        for number, head in enumerate(heads):
            own = torch.ones_like(figures_2N[0]) if len(heads) == 1 else found["teacher"] == number
            places = own.nonzero()[:, 0]
            if not len(places):
                continue
            compared = compare(
                hidden_NH[places],
                layer,
                states_NH[places, : head.weight_VH.shape[1]],
                cut(head, self.words),
                kind=self.kind,
                js_weight=self.js_weight,
                temperature=temperature,
            )
            figures_2N = figures_2N.index_copy(1, places, torch.stack(compared))
        return {"teacher_kl": figures_2N[0], "teacher_agrees": figures_2N[1]}

    def read_heads(self, device: torch.device, dtype: torch.dtype | None) -> list[OutputLayer]:
        """Read the output layers of the teachers with folders of their own."""
        return [self._read_head(dict(model), device, dtype) for model in self.models]

    def _read_head(
        self, options: dict[str, Any], device: torch.device, dtype: torch.dtype | None
    ) -> OutputLayer:
        path = options.pop("path")
        model, source = defer_causal_lm(path, **options)
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ModelError(f"teacher {path}: {type(model).__name__} has no linear output layer")
        names = {id(weight): name for name, weight in model.named_parameters()}
        read = source.read if source.readable else dict(source.stream()).__getitem__
        weights = [
            None if weight is None else read(names[id(weight)])[: self.words].to(device, dtype)
            for weight in (head.weight, head.bias)
        ]
        scale, soft_cap = projection_of(model.config)
        return OutputLayer(weights[0], weights[1], scale, soft_cap)


def as_layer(projection: Any) -> OutputLayer:
    """Return an output layer that is a matrix; ``ModelError`` for one that computes anything else."""
    if not isinstance(projection, OutputLayer):
        raise ModelError(
            "teacher.kl compares output layers that are plain matrices, and that of this model is not one; "
            "set teacher.kl=sampled"
        )
    return projection
