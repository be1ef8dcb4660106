"""Passes in 16 bits of a model whose weights are float32.

Autocast casts every weight again in every micro-batch and keeps the residual stream in float32. Here weights
are cast once for all passes in the body of ``low_precision``, and the residual stream is in 16 bits, as under
FSDP2's mixed precision.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


@contextmanager
def low_precision(
    model: nn.Module, dtype: torch.dtype | None, *, besides: Collection[nn.Module] = ()
) -> Generator[None]:
    """Compute in ``dtype`` in the body, with copies of the float32 parameters; None: in the weights' dtype.

    Gradients of every use of a parameter are added to its ``grad`` in float32: those of tied weights, and of
    the rows of an embedding, are not added up in 16 bits. ``besides`` are modules to leave as they are.
    """
    if dtype is None:
        yield
        return
    copies: dict[int, Tensor] = {}
    replaced: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    hooks = []
    skipped = set(map(id, besides))
    try:
        for module in model.modules():
            if id(module) in skipped:
                continue
            if isinstance(module, nn.Embedding):
                hooks.append(module.register_forward_hook(lambda _, ids, states: states.to(dtype)))
                continue
            parameters: dict[str, Any] = module._parameters
            for name, parameter in parameters.items():
                if parameter is None or parameter.dtype != torch.float32:
                    continue
                if id(parameter) not in copies:
                    copies[id(parameter)] = parameter.detach().to(dtype)
                copy = copies[id(parameter)]
                parameters[name] = _Use.apply(parameter, copy)
                replaced.append((parameters, name, parameter))
        yield
    finally:
        for parameters, name, parameter in replaced:
            parameters[name] = parameter
        for hook in hooks:
            hook.remove()


class _Use(torch.autograd.Function):
    """One use of a parameter by its copy."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, copy: Tensor) -> Tensor:
        ctx.parameter = parameter
        return copy.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        # Added in place: a returned gradient would be cast to a tensor of its own first.
        if ctx.parameter.grad is None:
            ctx.parameter.grad = gradient.to(ctx.parameter.dtype)
        else:
            ctx.parameter.grad += gradient
        return None, None
