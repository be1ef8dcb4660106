"""Forward passes over rows whose tokens form a tree (``strop.algorithms.token_tree``): a sequence a leaf.

The sequences have the layout of rollouts, so that a pass over them may be padded or packed. Their prompts are
all tokens before the first sampled one: leaves with equal ones share them in packed passes. Other shared
tokens are computed for each leaf that has them, and learned from in the first.

Shapes: B rows of L = P + T columns, S sequences, N sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from strop.algorithms import token_tree
from strop.models.passes.micro_batch import MicroBatch, on_cpu, send
from strop.protocol import sequence_columns

_AT_SAMPLED = {"ref_hidden", "teacher", "teacher_hidden", "teacher_ids", "teacher_top"}
"""Columns [B, T] or [B, T, ...] that passes read at sampled tokens only."""

Forward = Callable[..., dict[str, Tensor]]


class Leaves:
    """The sequences of a batch, and the way of their outputs back to its rows."""

    def __init__(self, batch: Mapping[str, Tensor]) -> None:
        on_host = {name: on_cpu(batch, name) for name in ("attention_mask", "response_mask", "follows")}
        self._shape = on_host["response_mask"].shape
        length = self._length = on_host["attention_mask"].shape[1]
        self._width = length - self._shape[1]
        found = token_tree.leaves(on_host)
        self._before = max(1, *(leaf.first for leaf in found))
        after = max(1, *(len(leaf.columns_K) - leaf.first for leaf in found))
        # of each token in [B * L]; -1: padding
        self._place_SL = torch.full((len(found), self._before + after), -1)
        self._own_SL = torch.zeros(self._place_SL.shape, dtype=torch.bool)
        for leaf, place_L, own_L in zip(found, self._place_SL, self._own_SL, strict=True):
            start = self._before - leaf.first
            place_L[start : start + len(leaf.columns_K)] = leaf.row * length + leaf.columns_K
            own_L[start : start + len(leaf.columns_K)] = leaf.own_K
        if isinstance(batch, MicroBatch):
            self.sequences: Mapping[str, Tensor] = batch.converted(self._converted)
        else:
            self.sequences = self._converted(batch)
        at_N2 = self._own_SL[:, self._before :].nonzero()
        places_N = self._place_SL[:, self._before :][*at_N2.t()]
        home_N2 = torch.stack([places_N // length, places_N % length - self._width], dim=1)
        if not len(at_N2):  # an output of 0, which keeps the graph: other ranks wait for this one's gradient
            at_N2 = home_N2 = torch.zeros(1, 2, dtype=torch.long)
        device = batch["input_ids"].device
        self._at, self._home = (
            tuple(send(index_N, device) for index_N in pair.t()) for pair in (at_N2, home_N2)
        )

    def _converted(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        device, split = columns["input_ids"].device, self._before
        place_SL, own_SL = (send(table_SL, device) for table_SL in (self._place_SL, self._own_SL))
        real_SL, place_SL = place_SL >= 0, place_SL.clamp(min=0)
        ids = columns["input_ids"].flatten()[place_SL] * real_SL
        found = {
            **sequence_columns(ids, real_SL.to(columns["attention_mask"].dtype)),
            "responses": ids[:, split:],
            "response_mask": own_SL[:, split:].to(columns["response_mask"].dtype),
        }
        rows, places = place_SL // self._length, place_SL % self._length - self._width
        if "images" in columns:
            has_prompt_S1 = (real_SL & (places < 0)).any(dim=1, keepdim=True)
            found["images"] = columns["images"][rows.amax(dim=1)] * has_prompt_S1
        if "images_at" in columns:
            found["images_at"] = columns["images_at"][rows, places.clamp(min=0)] * (real_SL & (places >= 0))
        for name in _AT_SAMPLED & columns.keys():
            found[name] = columns[name][rows, places.clamp(min=0)][:, split:]
        return found

    def folded(self, output: Tensor) -> Tensor:
        """Return an output of the sequences at the tokens of the rows [B, T, ...]; 0 if not sampled."""
        zeros = output.new_zeros(*self._shape, *output.shape[2:])
        return zeros.index_put(self._home, output[self._at])  # no view, whose hooks FSDP2 may lose


def leaves_of(batch: Mapping[str, Tensor]) -> Leaves | None:
    """Return the sequences of a batch; None if all of its rows are plain."""
    if "follows" not in batch or not token_tree.has_branches(on_cpu(batch, "follows")).any():
        return None
    return Leaves(batch)


def by_leaf(forward: Forward) -> Forward:
    """Let a forward pass with outputs [B, T, ...] take rows whose tokens form a tree."""

    @wraps(forward)
    def folding(role: Any, batch: Mapping[str, Tensor], **options: Any) -> dict[str, Tensor]:
        leaves = leaves_of(batch)
        if leaves is None:
            return forward(role, batch, **options)
        outputs = forward(role, leaves.sequences, **options)
        return {name: leaves.folded(output) for name, output in outputs.items()}

    return folding
