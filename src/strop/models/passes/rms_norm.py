"""RMSNorm with a backward pass of few kernels, in place of the classes of transformers.

Their Python makes a pass over memory for every operation, and autograd more than twice as many: forward and
backward take 2 to 6 times as long as here on a CPU. The results of the forward pass are the same bits there;
gradients of 16 bits are rounded once.

Shapes: B rows of L tokens, H hidden, n rows of one part.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn import functional

_ROWS = 2048
"""Rows whose part of the weight's gradient is summed up one by one in float32; then parts are added."""


def replace_rms_norms(model: nn.Module) -> int:
    """Let every RMSNorm of ``model`` compute here, and return their number.

    Left alone are modules of another formula (Gemma's 1 + w, gates, one rounding less), which a comparison of
    their own forward passes detects.
    """
    verdicts: dict[tuple[type, int, float], bool] = {}
    replaced = 0
    for module in model.modules():
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        # by name, as every family has its own class; _is_rms_norm decides
        if not type(module).__name__.endswith("RMSNorm") or not isinstance(eps, float):
            continue
        if [name for name, _ in module.named_parameters()] != ["weight"] or "forward" in vars(module):
            continue
        kind = type(module), len(module.get_parameter("weight")), eps
        if kind not in verdicts:
            verdicts[kind] = _is_rms_norm(module, eps)
        if verdicts[kind]:
            module.forward = MethodType(_forward, module)
            replaced += 1
    return replaced


@torch.no_grad()
def _is_rms_norm(module: nn.Module, eps: float) -> bool:
    """Compare the module's own forward pass, with a random weight, in float32 and bfloat16."""
    generator = torch.Generator().manual_seed(0)
    hidden = len(module.get_parameter("weight"))
    weight_H = torch.randn(hidden, generator=generator)
    states_BLH = torch.randn(1, 16, hidden, generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        weight, states = weight_H.to(dtype), states_BLH.to(dtype)
        try:
            own = functional_call(module, {"weight": weight}, (states,))
        except (TypeError, RuntimeError):  # it takes other arguments
            return False
        # equal bits: a formula with one rounding less differs in the last bit alone
        if not torch.equal(own, _normalized(states, _scale(states, eps)) * weight):
            return False
    return True


def _forward(self: Any, hidden_states: Tensor) -> Tensor:
    weight, eps = self.weight, getattr(self, "variance_epsilon", None) or self.eps
    # A graph fuses the family's operations; torch 2.11 compiles the function below to wrong gradients.
    if weight.dtype != hidden_states.dtype or torch.compiler.is_compiling():
        return type(self).forward(self, hidden_states)
    if hidden_states.device.type != "cpu":
        return functional.rms_norm(hidden_states, weight.shape, weight, eps)
    if not torch.is_grad_enabled():  # with the weight, torch would round once instead of twice
        return functional.rms_norm(hidden_states, weight.shape, None, eps).mul_(weight)
    return _RMSNorm.apply(hidden_states, weight, eps)


def _scale(states: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(mean of squares + eps) [..., 1], in float32."""
    return torch.rsqrt(states.float().square().mean(-1, keepdim=True) + eps)


def _normalized(states: Tensor, scale: Tensor) -> Tensor:
    return (states.float() * scale).to(states.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        scale = _scale(states, eps)
        ctx.save_for_backward(states, weight_H, scale)
        return _normalized(states, scale).mul_(weight_H)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """Correct the gradient of a LayerNorm whose mean is 0, which lacks the gradient through the mean."""
        states, weight_H, scale = ctx.saved_tensors
        wants_weight = ctx.needs_input_grad[1]
        weight_H, hidden = weight_H.float(), len(weight_H)
        states_gradient, weight_gradient_H = states.new_empty(states.shape), torch.zeros_like(weight_H)
        rows = (x.reshape(-1, x.shape[-1]).split(_ROWS) for x in (states, gradient, scale, states_gradient))
        for states_nH, gradient_nH, scale_n1, out_nH in zip(*rows, strict=True):
            gradient_nH = gradient_nH.float()
            found_nH, found_H, _ = torch.ops.aten.native_layer_norm_backward(
                gradient_nH,
                states_nH.float(),
                [hidden],
                torch.zeros_like(scale_n1),
                scale_n1,
                weight_H,
                None,
                [True, wants_weight, False],
            )
            through_mean_n = gradient_nH @ weight_H * (scale_n1[:, 0] / hidden)
            out_nH.copy_(found_nH.add_(through_mean_n[:, None]))
            if wants_weight:
                weight_gradient_H += found_H
        return states_gradient, weight_gradient_H if wants_weight else None, None
