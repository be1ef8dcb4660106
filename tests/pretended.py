"""A device that is not there, in place of a GPU: its tensors hold their numbers in CPU memory.

They say that they are on the meta device, and refuse to meet tensors of the CPU, as those of a GPU do.
Counted is what makes a CPU wait for a GPU: reading a number, copies that are not ``non_blocking`` or of
tensors that are not contiguous, and operations whose result has a size that depends on numbers.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
READS = ("_local_scalar_dense", "item", "equal", "is_nonzero")
SIZED = ("nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "repeat_interleave")
INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")
COPIES = ("copy_", "_to_copy")


class OnDevice(Tensor):
    """A tensor of the device; ``held`` has its numbers. Parked, it is one of the CPU."""

    parked = False

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        tensor = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        tensor.held = held
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{operation}: a tensor of the device outlived it")

    def __repr__(self) -> str:
        return f"OnDevice({tuple(self.shape)}, {self.dtype})"


class Device(TorchDispatchMode):
    """The device, for the body of a ``with``; ``waits`` counts by kind and by line of strop."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self._before = 0

    def place(self, module: nn.Module) -> nn.Module:
        """Move a module here; tied weights stay tied."""
        moved: dict[int, Tensor] = {}

        def move(tensor: Tensor) -> Tensor:
            if id(tensor) not in moved:
                copy: Tensor = OnDevice(tensor.detach().clone())
                if isinstance(tensor, nn.Parameter):
                    held, copy = copy.held, nn.Parameter(copy, requires_grad=tensor.requires_grad)
                    copy.held = held
                moved[id(tensor)] = copy
            return moved[id(tensor)]

        for owner in module.modules():
            for tensors in (owner._parameters, owner._buffers):
                tensors.update({name: move(tensor) for name, tensor in tensors.items() if tensor is not None})
        return module

    def waited(self) -> int:
        """Return the number of waits since the last call."""
        before, self._before = self._before, self.waits.total()
        return self._before - before

    def _wait(self, kind: str) -> None:
        frame, places = sys._getframe(3), []
        while frame is not None and len(places) < 2:
            if "/strop/" in frame.f_code.co_filename and "site-packages" not in frame.f_code.co_filename:
                places.append(f"{frame.f_code.co_filename.rpartition('/strop/')[2]}:{frame.f_lineno}")
            frame = frame.f_back
        self.waits[f"{kind} at {' < '.join(places) or 'the backward pass'}"] += 1

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = operation.overloadpacket.__name__, dict(kwargs or {})
        leaves = tree_leaves((args, kwargs))
        here = [leaf for leaf in leaves if is_here(leaf)]
        on_cpu = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not is_here(leaf)]
        to = kwargs.get("device")
        to = None if to is None else torch.device(to).type
        blocks = not kwargs.get("non_blocking") and not (name == "copy_" and args[2:] == (True,))
        # torch copies them to contiguous memory first, which is not pinned
        blocks = blocks or not all(tensor.is_contiguous() for tensor in on_cpu)
        if here and any(tensor.dim() for tensor in on_cpu):
            if name in INDEXED:
                self._wait("indices on the CPU")
            elif name != "copy_":
                raise RuntimeError(f"Expected all tensors to be on the same device: {name}")
            elif blocks:
                self._wait("copy")
        if here and name in READS:
            self._wait("number")
        if here and name in SIZED and kwargs.get("output_size") is None:
            self._wait(name)
        if name in INDEXED and any(
            is_here(leaf) and leaf.dtype in (torch.bool, torch.uint8) for leaf in tree_leaves(args[1])
        ):
            self._wait("mask as index")
        if name == "_to_copy" and blocks and ((here and to == "cpu") or (not here and to == "meta")):
            self._wait("copy")
        stays = (bool(here) and to != "cpu" and name not in READS) or to == "meta"
        if to is not None:
            kwargs["device"] = "cpu"
        held = tree_map(lambda leaf: leaf.held if isinstance(leaf, OnDevice) else leaf, (args, kwargs))
        written = {id(leaf.held): leaf for leaf in here}

        def wrapped(leaf: Any) -> Any:
            if not stays or not isinstance(leaf, Tensor):
                return leaf
            return written.get(id(leaf)) if id(leaf) in written else OnDevice(leaf)

        return tree_map(wrapped, operation(*held[0], **held[1]))


def is_here(leaf: Any) -> bool:
    return isinstance(leaf, OnDevice) and not leaf.parked


def replace_tensors(module: nn.Module, change: Any) -> None:
    """Replace what parameters and buffers hold, and where: torch swaps them for tensors of one kind only."""
    for tensor in {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}.values():
        other = change(tensor)
        if other is not tensor:
            tensor.held, tensor.parked = getattr(other, "held", other), not isinstance(other, OnDevice)


def prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teach torch what it does not know of the device: autocast, fused steps, streams, tensors of lists."""
    enabled, autocast, tensor = torch.is_autocast_enabled, torch.autocast, torch.tensor
    optimizers = importlib.import_module("torch.optim.optimizer")  # torch.optim hides it
    fused = optimizers._get_fused_kernels_supported_devices

    def is_enabled(device: str = "cpu") -> bool:
        return device != "meta" and enabled(device)

    def autocasts(device: str, *args: Any, **kwargs: Any) -> Any:
        return nullcontext() if device == "meta" else autocast(device, *args, **kwargs)

    def made(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        found = tensor(*args, **kwargs)
        return found if device is None else found.to(device)

    monkeypatch.setattr(torch, "is_autocast_enabled", is_enabled)
    monkeypatch.setattr(torch, "autocast", autocasts)
    monkeypatch.setattr(torch, "tensor", made)
    monkeypatch.setattr(torch, "get_device_module", lambda device: torch.cpu)
    monkeypatch.setattr(optimizers, "_get_fused_kernels_supported_devices", lambda: [*fused(), "meta"])
