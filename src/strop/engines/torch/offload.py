"""Parameters and moments that wait in CPU memory between the phases that use them."""

from __future__ import annotations

import mmap
import weakref
from collections import defaultdict
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from strop.engines.torch.sharding import part, reshard
from strop.torch_private import pin, replace_tensors, writes_in_place

_MOVED_AT_ONCE = 1 << 28
"""Largest size in bytes of the moments in one part that passes through the device."""
_ALIGNMENT = 64
"""Bytes of which offsets are multiples: a cache line, and a multiple of the size of every dtype."""


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """Begin to copy a tensor in pinned memory to ``device``."""
    return tensor.to(device, non_blocking=True)


@torch.no_grad()
def pinned_like(tensors: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    """Return tensors like these in CPU memory, pinned for a GPU, with undefined values.

    They share one mapping of the exact size.
    """
    found = [torch.empty_like(tensor, device="cpu") for tensor in tensors]
    sizes = [-(-part(tensor).nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in found]
    if not sum(sizes):
        return found
    # torch's allocator rounds a pinned block up to a power of two: 543 MB would take 1 GiB
    memory = np.frombuffer(mmap.mmap(-1, sum(sizes)), np.uint8)
    if device.type == "cuda":
        weakref.finalize(memory, pin(memory.ctypes.data, memory.nbytes)).atexit = False
    for tensor, size, end in zip(found, sizes, accumulate(sizes), strict=True):
        if size:
            local = part(tensor)
            flat = torch.frombuffer(memory, dtype=local.dtype, count=local.numel(), offset=end - size)
            # in .data: the DTensor around it keeps this object as its part
            local.data = flat.as_strided(local.shape, local.stride())
    return found


class Offload:
    """Move a module and its optimizer's moments between the device and the CPU.

    Copies wait in pinned memory, so that transfers run at the bus's full speed, and the CPU prepares
    micro-batches while parameters come back. Only parameters that changed on the device are copied to the
    CPU. Moments pass through the device in the optimizer's step, some at a time. Gradients are not offloaded:
    between phases there are none. Where ranks do not divide a parameter evenly, FSDP2 replaces the smaller
    part by new memory, which is not pinned: its copies are slower.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
        *,
        parameters: bool = False,
        moments: bool = False,
    ) -> None:
        """Offload parameters or moments while they are not used; without effect on a CPU."""
        self._parameters = parameters and device.type != "cpu"
        self._moments = moments and device.type != "cpu"
        self._module, self._optimizer, self._device = module, optimizer, device
        self._parked = False
        self._arrived: dict[int, _Arrival] = {}
        """Parameters and buffers that were copied to the device, by id."""

    @torch.no_grad()
    def bring_parameters(self) -> None:
        """Move parameters to the device if they are offloaded."""
        if not self._parked:
            return
        held = self._held()
        waiting = [tensor.detach() for tensor in held]
        self._replace(held, [copied(tensor, self._device) for tensor in waiting])
        pairs = zip(self._held(), waiting, strict=True)
        self._arrived = {id(tensor): _Arrival(tensor, _versions(tensor), host) for tensor, host in pairs}
        self._parked = False

    @torch.no_grad()
    def park_parameters(self) -> None:
        """Move parameters to the CPU if ``param_offload`` is on."""
        if not self._parameters or self._parked:
            return
        held = self._held()
        new = [tensor for tensor in held if id(tensor) not in self._arrived]
        hosts = {key: arrival.host for key, arrival in self._arrived.items()}
        hosts.update(zip(map(id, new), pinned_like(new, self._device), strict=True))
        waiting = [hosts[id(tensor)] for tensor in held]
        for tensor, host in zip(held, waiting, strict=True):
            arrival = self._arrived.get(id(tensor))
            # torch counts writes in place; frozen and unchanged parameters are in pinned memory already
            if arrival is None or arrival.versions != _versions(tensor):
                part(host).copy_(part(tensor), non_blocking=True)
        # Before FSDP2 reads them: it pads parts of unequal size as it takes them over.
        self._wait()
        self._replace(held, waiting)
        self._arrived, self._parked = {}, True

    @torch.no_grad()
    def parked_moments(self, moments: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a parameter's new moments where they wait: on the CPU if ``optimizer_offload`` is on."""
        if not self._moments:
            return moments
        parked = dict(zip(moments, pinned_like(moments.values(), self._device), strict=True))
        for name, tensor in moments.items():
            part(parked[name]).copy_(part(tensor), non_blocking=True)
        self._wait()
        return parked

    @torch.no_grad()
    def step(self) -> None:
        """Take the optimizer's step; offloaded moments pass through the device in parts."""
        if (optimizer := self._optimizer) is None:
            raise RuntimeError("there is no optimizer")
        try:
            if self._moments:
                self._pass_moments(optimizer)
            else:
                optimizer.step()
        finally:  # fused kernels do not count as operations in place
            parameters = (member for group in optimizer.param_groups for member in group["params"])
            increment_version([part(parameter) for parameter in parameters])

    def _pass_moments(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimizer's step in parts.

        One part arrives while the one before it is used and leaves, in separate streams, so that the bus
        works in both directions, and two parts are on the device.
        """
        backend = torch.get_device_module(self._device)
        (arriving, leaving), left = self._streams, backend.Event()
        parts = list(_parts(optimizer))
        here, ahead = [], self._arrivals(optimizer, parts[0], arriving)
        for pieces, following in zip(parts, [*parts[1:], []], strict=True):
            backend.current_stream().wait_stream(arriving)
            left.synchronize()  # a CPU that runs ahead would fill the device with all moments
            here = ahead  # frees the part before it
            ahead = self._arrivals(optimizer, following, arriving)
            _step(optimizer, pieces, here)
            leaving.wait_stream(backend.current_stream())
            with backend.stream(leaving):
                _leave(optimizer, pieces, here)
            left = backend.Event()
            left.record(leaving)
        left.synchronize()

    @cached_property
    def _streams(self) -> tuple[Any, Any]:
        """Streams in which moments arrive and leave."""
        # made once: torch's allocator keeps freed blocks by stream, and new streams left 0.5 GiB behind
        backend = torch.get_device_module(self._device)
        return backend.Stream(), backend.Stream()

    def _arrivals(
        self, optimizer: torch.optim.Optimizer, pieces: list[_Piece], stream: Any
    ) -> list[dict[str, Tensor]]:
        """Begin to copy the moments of ``pieces`` to the device."""
        with torch.get_device_module(self._device).stream(stream):
            return [
                {
                    name: copied(piece.of(tensor), self._device)
                    for name, tensor in optimizer.state[piece.parameter].items()
                }
                for piece in pieces
            ]

    def _held(self) -> list[Tensor]:
        reshard(self._module)  # what is gathered is not moved
        return [*self._module.parameters(), *self._module.buffers()]

    def _replace(self, held: list[Tensor], others: list[Tensor]) -> None:
        places = dict(zip(map(id, held), others, strict=True))
        replace_tensors(self._module, lambda tensor: places.get(id(tensor), tensor))

    def _wait(self) -> None:
        """Wait until copies in CPU memory can be read and written."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


@dataclass(frozen=True)
class _Arrival:
    """A parameter or buffer on the device, its versions after it was copied there, and the original."""

    tensor: Tensor
    versions: tuple[int, int]
    host: Tensor


def _versions(tensor: Tensor) -> tuple[int, int]:
    """Return the numbers that count operations in place, on a DTensor and on its part."""
    return writes_in_place(tensor), writes_in_place(part(tensor))


@dataclass(frozen=True)
class _Piece:
    """A parameter, or consecutive elements of a large one."""

    parameter: nn.Parameter
    elements: slice | None = None
    is_last: bool = True

    def of(self, tensor: Tensor) -> Tensor:
        """Return this piece of the parameter, its gradient or a moment; the count of steps is whole."""
        local = part(tensor)
        return local if self.elements is None or local.dim() == 0 else local.reshape(-1)[self.elements]


def _parts(optimizer: torch.optim.Optimizer) -> Generator[list[_Piece]]:
    """Yield all parameters in order, those with moments of up to ``_MOVED_AT_ONCE`` bytes together."""
    chosen, size = [], 0
    for parameter in (member for group in optimizer.param_groups for member in group["params"]):
        for piece in _pieces(parameter):
            # two moments, in the parameter's dtype
            needed = 2 * piece.of(parameter).nbytes
            if chosen and size + needed > _MOVED_AT_ONCE:
                yield chosen
                chosen, size = [], 0
            chosen.append(piece)
            size += needed
    if chosen:
        yield chosen


def _pieces(parameter: nn.Parameter) -> list[_Piece]:
    """Cut a parameter with moments of more than ``_MOVED_AT_ONCE`` bytes into pieces."""
    local = part(parameter)
    count, limit = local.numel(), _MOVED_AT_ONCE // (2 * local.element_size())
    if count <= limit or not local.is_contiguous():  # others have no flat view
        return [_Piece(parameter)]
    starts = range(0, count, limit)
    return [_Piece(parameter, slice(start, start + limit), start == starts[-1]) for start in starts]


def _step(optimizer: torch.optim.Optimizer, pieces: list[_Piece], moments: list[dict[str, Tensor]]) -> None:
    """Take the step of ``pieces`` alone, with ``moments`` in place of those in the optimizer's state.

    AdamW treats every element by itself, so pieces take the step of their parameter.
    """
    groups, state = [group["params"] for group in optimizer.param_groups], optimizer.state
    chosen: dict[int, list[Tensor]] = defaultdict(list)
    optimizer.state = defaultdict(dict)
    for piece, named in zip(pieces, moments, strict=True):
        tensor, gradient = piece.of(piece.parameter).detach(), piece.parameter.grad
        tensor.grad = None if gradient is None else piece.of(gradient)
        chosen[id(piece.parameter)].append(tensor)
        optimizer.state[tensor] = named
    for group, members in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [tensor for member in members for tensor in chosen[id(member)]]
    try:
        optimizer.step()
    finally:
        optimizer.state = state
        for group, members in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = members


def _leave(optimizer: torch.optim.Optimizer, pieces: list[_Piece], moments: list[dict[str, Tensor]]) -> None:
    """Begin to copy moments from the device into the optimizer's state."""
    for piece, named in zip(pieces, moments, strict=True):
        for name, tensor in named.items():
            if tensor.dim() or piece.is_last:  # every piece begins from the same count of steps
                piece.of(optimizer.state[piece.parameter][name]).copy_(tensor, non_blocking=True)
