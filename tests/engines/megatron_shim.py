"""Let megatron-core run on a CPU over gloo: it calls ``torch.cuda`` and allocates on ``cuda`` by name.

For tests alone. Importing the module installs the replacements for the rest of the process.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch.utils._device import _device_constructors

_FACTORIES = ("arange", "as_tensor", "empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like")


class _Nothing:
    """Stream or event without a device."""

    def __init__(self, *args: object, **options: object) -> None: ...
    def record(self, *args: object) -> None: ...
    def wait(self, *args: object) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, *args: object) -> None: ...
    def wait_event(self, *args: object) -> None: ...
    def record_event(self, *args: object) -> _Nothing:
        return self


def _on_cpu(factory: Any) -> Any:
    @functools.wraps(factory)
    def made(*args: Any, **options: Any) -> Any:
        if "cuda" in str(options.get("device")):
            options["device"] = "cpu"
        return factory(*args, **options)

    return made


def _all_to_all(output: Any, input: Any, *sizes: Any, **options: Any) -> Any:
    """Sizes come as tensors: megatron-core makes lists of those on a GPU alone."""
    options = {k: each.tolist() if isinstance(each, torch.Tensor) else each for k, each in options.items()}
    return _own_all_to_all(output, input, *sizes, **options)


def _for_cpu(decorator: Any) -> Any:
    return lambda function, *, device_type: decorator(function, device_type="cpu")


def _type(self: torch.Tensor, *args: Any, **options: Any) -> Any:
    """``Tensor.type()`` names a CUDA tensor, which megatron-core's clipping and buffers require."""
    if args or options:
        return _own_type(self, *args, **options)
    return _own_type(self).replace("torch.", "torch.cuda.", 1)


_own_type = torch.Tensor.type
_own_all_to_all = torch.distributed.all_to_all_single
_own_amp = {name: getattr(torch.amp, name) for name in ("custom_fwd", "custom_bwd")}


def _install() -> None:
    _device_constructors()  # cached: `with torch.device("meta")` must know torch's own functions
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    for name in ("current_stream", "default_stream"):
        setattr(cuda, name, lambda *args: _Nothing())
    for name in ("set_device", "synchronize", "set_rng_state", "manual_seed"):
        setattr(cuda, name, lambda *args, **options: None)
    cuda.Stream = cuda.Event = _Nothing
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.is_current_stream_capturing = lambda: False
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **options: torch.get_rng_state()
    torch.distributed.all_to_all_single = _all_to_all
    tensor: Any = torch.Tensor
    tensor.type = _type
    tensor.cuda = lambda self, *args, **options: self
    for name, own in _own_amp.items():  # they restore autocast, of the CPU here, in the backward pass
        setattr(torch.amp, name, _for_cpu(own))
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


if not torch.cuda.is_available():
    _install()
