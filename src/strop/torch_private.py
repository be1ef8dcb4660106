"""Names of torch without a public counterpart, read in torch 2.13; the rest of strop reaches into none.

``tests/test_private_names.py`` fails by name where torch moves one, and where another file uses one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """Return the module's own parameters, as it looks them up: other tensors may be put in their places."""
    return module._parameters


def replace_tensors(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter, gradient and buffer, also of modules that FSDP2 shards."""
    module._apply(change)


def has_backward_hooks(tensor: Tensor) -> bool:
    """Return True if a hook on the tensor itself changes gradients."""
    return bool(tensor._backward_hooks)


def has_forward_hooks(module: nn.Module) -> bool:
    """Return True if hooks see the module's calls."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def writes_in_place(tensor: Tensor) -> int:
    """Return the number of operations that have changed ``tensor`` in place; 0 in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def written_by(operator: Any, arguments: Sequence[Any], options: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that a call of an operator changes in place."""
    schema = getattr(operator, "_schema", None)  # operators of higher order have none
    if schema is None or not schema.is_mutable:
        return []
    given = {place.name: value for place, value in zip(schema.arguments, arguments, strict=False)} | options
    changed = [given.get(place.name) for place in schema.arguments if place.is_write]
    return [tensor for value in changed for tensor in _tensors(value)]


@contextmanager
def operators_seen(
    look: Callable[[Any, Sequence[Any], dict[str, Any], list[Tensor]], None],
) -> Generator[None]:
    """Call ``look(operator, arguments, options, results)`` after each operator, below autograd."""

    class Mode(TorchDispatchMode):
        supports_higher_order_operators = True

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            results = func(*args, **(kwargs or {}))
            look(func, args, kwargs or {}, _tensors(results))
            return results

    with Mode():
        yield


def _tensors(value: Any) -> list[Tensor]:
    found = value if isinstance(value, tuple | list) else [value]
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def scale_in_place(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply all tensors, in few kernels."""
    torch._foreach_mul_(tensors, factor)


def wrapper(kind: type[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Any:
    """Return a tensor of the subclass ``kind`` without memory."""
    return Tensor._make_wrapper_subclass(kind, shape, dtype=dtype)


def nccl_options(timeout: timedelta) -> Any:
    """Return options of ``ProcessGroupNCCL``, whose constructor takes no timeout."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options


def gloo_options(address: str, timeout: timedelta) -> Any:
    """Return options of ``ProcessGroupGloo`` at an own address, whatever the host's name and GLOO_* say."""
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(hostname=address)]
    options._timeout = timeout
    return options


def pin(address: int, size: int) -> Callable[[], None]:
    """Pin memory for transfers to a GPU; return what unpins it."""
    from torch.cuda._pin_memory_utils import pin_memory, unpin_memory

    pin_memory(address, size)
    return lambda: unpin_memory(address)


def storage_info() -> type:
    """Return the class of the places of tensors in the index of ``torch.distributed.checkpoint``."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo


@cache
def multiplies_bfloat16() -> bool:
    """Return True if this CPU has oneDNN's products in bfloat16."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def blocked(weight: Tensor, rows: int) -> Tensor:
    """Return the weight of a linear layer in oneDNN's blocked layout, chosen for inputs of ``rows`` rows."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)


def blocked_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the linear layer's output, by a weight of ``blocked``."""
    return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")


def softmax_backward(gradient: Tensor, probs: Tensor) -> Tensor:
    """Return the gradient of the scores, over the last dimension, from that of their softmax."""
    return torch.ops.aten._softmax_backward_data(gradient, probs, -1, probs.dtype)


def set_allocator(settings: str) -> None:
    """Change settings of the allocator of GPU memory, as ``PYTORCH_ALLOC_CONF`` has them, in a process."""
    torch._C._accelerator_setAllocatorSettings(settings)
