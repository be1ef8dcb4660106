"""Passes in 16 bits of a model whose weights are float32.

Autocast casts every weight again in every micro-batch and keeps the residual stream in float32. Here weights
are cast once for all passes in the body of ``low_precision``, and the residual stream is in 16 bits, as under
FSDP2's mixed precision.

Shapes: N tokens, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from strop.torch_private import has_backward_hooks, own_parameters

_CAST_AT_ONCE = 1 << 18
"""Numbers of a gradient that a CPU casts to float32 at once, few enough for its cache: 1 MiB."""


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
    hooks, embeddings = [], []
    skipped = set(map(id, besides))
    try:
        for module in model.modules():
            if id(module) in skipped:
                continue
            if isinstance(module, nn.Embedding):
                # looked up in float32 and cast after: casting the table would copy the vocabulary
                hooks.append(module.register_forward_hook(lambda _, ids, states: states.to(dtype)))
                if _looks_up(module):
                    module.forward = MethodType(_look_up, module)
                    embeddings.append(module)
                continue
            # _parameters, because setattr refuses a tensor that is no nn.Parameter
            parameters = own_parameters(module)
            for name, parameter in parameters.items():
                if parameter is None or parameter.dtype != torch.float32:
                    continue
                if has_backward_hooks(parameter):  # called by autograd only
                    parameters[name] = parameter.to(dtype)
                else:
                    if id(parameter) not in copies:
                        # once for all micro-batches and, by identity, for both uses of a tied weight
                        copies[id(parameter)] = parameter.detach().to(dtype)
                    parameters[name] = _Use.apply(parameter, copies[id(parameter)])
                replaced.append((parameters, name, parameter))
        yield
    finally:
        for parameters, name, parameter in replaced:
            parameters[name] = parameter
        for hook in hooks:
            hook.remove()
        for module in embeddings:
            del module.forward


class _Use(torch.autograd.Function):
    """One use of a parameter by its copy."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, copy: Tensor) -> Tensor:
        ctx.parameter = parameter
        # another tensor object: autograd attaches the graph of this use to it, not to the shared copy
        return copy.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        # Added in place: a returned gradient would be cast to another tensor first.
        if ctx.parameter.grad is None:
            ctx.parameter.grad = gradient.to(ctx.parameter.dtype)
        else:
            _add(gradient, ctx.parameter.grad)
        return None, None


def _add(gradient: Tensor, total: Tensor) -> None:
    """Add to a float32 gradient; on a CPU in parts, because torch casts all of it before it adds it."""
    in_parts = gradient.is_cpu and gradient.numel() > _CAST_AT_ONCE
    if in_parts and gradient.is_contiguous() and total.is_contiguous():
        parts = zip(*(x.flatten().split(_CAST_AT_ONCE) for x in (gradient, total)), strict=True)
        for part, part_of_total in parts:
            part_of_total += part
    else:
        total += gradient


def _looks_up(module: nn.Embedding) -> bool:
    """Return True if ``_look_up`` computes as ``module`` does, on a CPU."""
    options = (module.max_norm, module.scale_grad_by_freq, module.sparse)
    return (
        type(module) is nn.Embedding
        and "forward" not in vars(module)
        and options == (None, False, False)
        and module.weight.is_cpu
        and not has_backward_hooks(module.weight)  # called by autograd only
    )


def _look_up(self: nn.Embedding, input: Tensor) -> Tensor:
    return _Lookup.apply(self.weight, input, self.padding_idx)


class _Lookup(torch.autograd.Function):
    """Rows of an embedding. Autograd would add a gradient of all rows, most of them zeros."""

    @staticmethod
    def forward(ctx: Any, weight_VH: Tensor, ids: Tensor, padding_id: int | None) -> Tensor:
        ctx.weight_VH, ctx.padding_id = weight_VH, padding_id
        ctx.save_for_backward(ids)
        return functional.embedding(ids, weight_VH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ids_N = ctx.saved_tensors[0].flatten()
        gradient_NH = gradient.reshape(-1, gradient.shape[-1])
        if ctx.padding_id is not None:
            gradient_NH = gradient_NH.masked_fill((ids_N == ctx.padding_id)[:, None], 0)
        if ctx.weight_VH.grad is None:
            ctx.weight_VH.grad = torch.zeros_like(ctx.weight_VH)
        ctx.weight_VH.grad.index_add_(0, ids_N, gradient_NH)
        return None, None, None
