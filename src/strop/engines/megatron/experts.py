"""Routed experts in megatron-core's layers: each rank holds some experts of a layer, whole.

Shapes: N tokens of this rank, T tokens that were sent to it, R experts of this rank, E experts, H hidden, B
sequences.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.nn import functional

from strop.engines.megatron.attention import Row
from strop.models.routing import Balance


class Router(TopKRouter):
    """Choose the experts of each token, and add the auxiliary loss of an update."""

    row: Row
    """The micro-batch, set before each pass."""
    number: int
    """Among the layers with experts."""
    balance: Balance | None = None
    """The current update; the same object in all layers."""

    def gating(self, input: Tensor) -> Tensor:
        """Return logits [N, 1, E]; megatron-core's function needs Transformer Engine (0.16)."""
        return functional.linear(input, self.weight)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the weights and choices [N, E] of tokens from logits [N, 1, E]."""
        probs_NE, chosen_NE = super().routing(logits, padding_mask)
        if self.balance is None or not torch.is_grad_enabled():  # a layer that is computed again: the second
            return probs_NE, chosen_NE
        logits_NE, total, tokens = logits.flatten(0, 1), None, self.row.tokens
        if self.config.sequence_parallel:  # the other tokens are on other ranks
            start = parallel_state.get_tensor_model_parallel_rank() * len(logits_NE)
            tokens, total = tokens.within(start, start + len(logits_NE)), _total
        loss = self.balance.add(self.number, logits_NE, tokens, total)
        # an identity that adds the loss's gradient in its backward pass: this stage has no objective
        return MoEAuxLossAutoScaler.apply(probs_NE, loss), chosen_NE


def _total(counts_BE: Tensor) -> Tensor:
    counts_BE = counts_BE.clone()
    dist.all_reduce(counts_BE, group=parallel_state.get_tensor_model_parallel_group())
    return counts_BE


class Experts(nn.Module):
    """This rank's experts, in one tensor for each projection, as transformers has them."""

    def __init__(self, count: int, config: Any, **_: Any) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.moe_ffn_hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * size, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, size))
        for weight in (self.gate_up_proj, self.down_proj):
            shared: Any = weight
            shared.allreduce = False  # gradients are summed over the ranks with the same experts alone

    def forward(self, tokens_TH: Tensor, counts_R: Tensor, weights_T: Tensor) -> tuple[Tensor, None]:
        """Return the weighted outputs [T, H] of tokens, which are sorted by expert."""
        counts = counts_R.tolist()
        outputs = []
        for tokens, weights, gate_up, down in zip(
            tokens_TH.split(counts), weights_T.split(counts), self.gate_up_proj, self.down_proj, strict=True
        ):
            gate, up = functional.linear(tokens, gate_up).chunk(2, dim=-1)
            output = functional.linear(functional.silu(gate) * up, down)
            outputs.append(output * weights[:, None].to(output.dtype))
        return torch.cat(outputs), None


class SharedExpert(SharedExpertMLP):
    """The expert that sees all tokens, cut by the ranks that share tensors."""

    def __init__(self, **options: Any) -> None:
        linear: Any = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        super().__init__(submodules=linear, **options)


_PARTS: Any = {"experts": Experts, "shared_experts": SharedExpert, "router": Router}
MIXTURE = ModuleSpec(MoELayer, submodules=MoESubmodules(**_PARTS))


class ExpertLayer(TransformerLayer):
    """A layer whose router is given the micro-batch, also when the layer is computed again."""

    def forward(self, *args: Any, **options: Any) -> Any:
        self.mlp.router.row = options["packed_seq_params"]
        return super().forward(*args, **options)


def has_experts(config: Any, layer: int) -> bool:
    """Return True if ``layer`` (from 0) of a Hugging Face configuration has routed experts."""
    return (
        getattr(config, "num_experts", 0) > 0
        and layer not in config.mlp_only_layers
        and (layer + 1) % config.decoder_sparse_step == 0
    )
