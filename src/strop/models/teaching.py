"""Comparison of a policy with its teacher in the policy's passes: the divergence of each response token.

Shapes: N tokens, H hidden, K words, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from strop.algorithms.distillation import chosen_log_probs, compare, cut, divergence
from strop.algorithms.output_layer import OutputLayer
from strop.errors import ModelError
from strop.models.deferred import defer_causal_lm
from strop.models.heads import projection_of

TEACHER_COLUMNS = ("teacher_hidden", "teacher_ids", "teacher_top")
"""Columns that passes ``with_teacher`` read, as far as a batch has them."""


@dataclass(frozen=True, kw_only=True)
class Teaching:
    """Divergence of a policy from its teacher."""

    kind: str
    js_weight: float
    words: int
    """Words of the tokenizer: heads are cut to them, as models pad theirs."""
    path: Path | None = None
    """Folder of the teacher, whose output layer is read; None: the policy's own as loaded, or not needed."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the loader."""

    def measure(
        self, hidden_NH: Tensor, layer: Any, found: Mapping[str, Tensor], head: Any, temperature: float
    ) -> dict[str, Tensor]:
        """Return ``teacher_kl`` and ``teacher_agrees`` [N]; ``found`` has columns of ``TEACHER_COLUMNS``."""
        layer = cut(as_layer(layer), self.words)
        if "teacher_ids" in found:
            ids_NK = found["teacher_ids"].long()
            student, best_N = chosen_log_probs(hidden_NH, layer, ids_NK, temperature=temperature)
            kl_N = divergence(found["teacher_top"], student, self.kind, self.js_weight)
            return {"teacher_kl": kl_N, "teacher_agrees": (best_N == ids_NK[:, 0]).float()}
        compared = compare(
            hidden_NH,
            layer,
            found["teacher_hidden"],
            cut(as_layer(head), self.words),
            kind=self.kind,
            js_weight=self.js_weight,
            temperature=temperature,
        )
        return {"teacher_kl": compared.divergence_N, "teacher_agrees": compared.agrees_N}

    def read_head(self, device: torch.device, dtype: torch.dtype | None) -> OutputLayer | None:
        """Read the teacher's output layer; None if it is not in a folder of its own."""
        if self.path is None:
            return None
        model, source = defer_causal_lm(self.path, **self.options)
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ModelError(f"teacher {self.path}: {type(model).__name__} has no linear output layer")
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
