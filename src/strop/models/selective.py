"""Selective checkpointing: operators of a layer whose results are kept for the backward pass.

A kept result must not be written into afterwards, as some families do (a bias added in place to the products
of experts, predictions of Gemma 3n). torch raises where it sees that, but it does not see a write through
``aten::_unsafe_view``, which every matrix product of more than two dimensions ends with: gradients would be
wrong. So a trial pass finds such operators, and they are computed again.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from strop.torch_private import operators_seen, written_by

KEPT_OPERATORS = frozenset(
    {
        *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"),
        *("aten::_grouped_mm", "aten::_scaled_mm", "aten::_scaled_grouped_mm"),  # of experts, and in 8 bits
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "aten::_cudnn_attention_forward",
        "torch_attn::_varlen_attn",  # torch.nn.attention.varlen
        *("flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward"),
        *("flash_attn_3::fwd", "flash_attn_3::_flash_attn_forward"),
        "inductor_compiled_code",  # of compiled regions, FlexAttention is the one that is an operator
        "flex_attention",  # where it is not compiled
    }
)
"""Operators whose results selective checkpointing keeps: matrix products and attention kernels."""


def name_of(operator: Any) -> str:
    """Return the name of an operator without its overload."""
    return operator.name().partition(".")[0]


class KeptResults:
    """Choice of the results that are kept, for the layers of one model."""

    def __init__(self) -> None:
        self.recomputed: set[str] = set()
        """Operators of ``KEPT_OPERATORS`` that are computed again, as the model writes into their results."""
        self._in_layer = False

    def policy(self, context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        """See ``torch.utils.checkpoint.create_selective_checkpoint_contexts``."""
        del context, arguments, options
        keeps = (name := name_of(operator)) in KEPT_OPERATORS and name not in self.recomputed
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts of a layer's forward pass and of its recomputation."""
        forward, again = create_selective_checkpoint_contexts(self.policy)
        return self._layer(forward), again

    @contextmanager
    def _layer(self, forward: AbstractContextManager[Any]) -> Generator[None]:
        self._in_layer = True
        try:
            with forward:
                yield
        finally:
            self._in_layer = False

    @contextmanager
    def trial(self) -> Generator[None]:
        """Compute the operators again from now on into whose results the forward pass in the body writes."""
        kept: dict[int, tuple[str, list[Tensor]]] = {}  # held, so that no other tensor gets their memory

        def look(operator: Any, arguments: Any, options: Any, results: list[Tensor]) -> None:
            for tensor in written_by(operator, arguments, options):
                if found := kept.get(tensor.untyped_storage().data_ptr()):
                    self.recomputed.add(found[0])
            if self._in_layer and (name := name_of(operator)) in KEPT_OPERATORS:
                kept.update({result.untyped_storage().data_ptr(): (name, results) for result in results})

        with operators_seen(look):
            yield
