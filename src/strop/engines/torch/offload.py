"""Parameters and moments that wait in CPU memory between the phases that use them."""

from __future__ import annotations

from collections.abc import Generator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from strop.engines.torch.sharding import part, reshard

_MOVED_AT_ONCE = 1 << 28
"""Bytes of moments that make up a part, which passes through the device whole; one tensor may have more."""


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """Begin to copy a tensor between a GPU and the CPU, where the copy is in pinned memory."""
    return tensor.to(device, non_blocking=True)


class Offload:
    """Move a module and its optimizer's moments between the device and the CPU.

    Copies wait in pinned memory, so that transfers run at the bus's full speed, and the CPU prepares
    micro-batches while parameters come back. Moments pass through the device in the optimizer's step, some at
    a time. Gradients are not offloaded: between phases there are none.
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

    def bring_parameters(self) -> None:
        """Move parameters to the device if they are offloaded."""
        if self._parameters:
            self._move_parameters(self._device)

    def park_parameters(self) -> None:
        """Move parameters to the CPU if ``param_offload`` is on."""
        if self._parameters:
            self._move_parameters(torch.device("cpu"))

    def parked_moments(self, moments: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a parameter's new moments where they wait: on the CPU if ``optimizer_offload`` is on."""
        if not self._moments:
            return moments
        parked = {name: copied(tensor, torch.device("cpu")) for name, tensor in moments.items()}
        self._wait_for(torch.device("cpu"))
        return parked

    def step(self) -> None:
        """Take the optimizer's step.

        Offloaded moments pass in parts: one arrives while the one before it is used and leaves, in separate
        streams, so that the bus works in both directions, and two parts are on the device.
        """
        if (optimizer := self._optimizer) is None:
            raise RuntimeError("there is no optimizer")
        if not self._moments:
            optimizer.step()
            return
        backend = torch.get_device_module(self._device)
        (arriving, leaving), left = self._streams, backend.Event()
        parts = list(_parts(optimizer))
        here, ahead = [], self._arrivals(optimizer, parts[0], arriving)
        for parameters, following in zip(parts, [*parts[1:], []], strict=True):
            backend.current_stream().wait_stream(arriving)
            left.synchronize()  # a CPU that runs ahead would fill the device with all moments
            here = ahead  # frees the part before it
            ahead = self._arrivals(optimizer, following, arriving)
            _step(optimizer, parameters, here)
            leaving.wait_stream(backend.current_stream())
            with backend.stream(leaving):
                _leave(optimizer, parameters, here)
            left = backend.Event()
            left.record(leaving)
        left.synchronize()

    @cached_property
    def _streams(self) -> tuple[Any, Any]:
        """Streams of arriving and leaving moments; new ones in each step would not reuse free memory."""
        backend = torch.get_device_module(self._device)
        return backend.Stream(), backend.Stream()

    def _arrivals(
        self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], stream: Any
    ) -> list[dict[str, Tensor]]:
        """Begin to copy the moments of ``parameters`` to the device."""
        states = [optimizer.state[parameter] for parameter in parameters]
        with torch.get_device_module(self._device).stream(stream):
            return [
                {name: copied(tensor, self._device) for name, tensor in state.items()} for state in states
            ]

    def _move_parameters(self, device: torch.device) -> None:
        reshard(self._module)  # what is gathered is not moved
        held = [*self._module.parameters(), *self._module.buffers()]
        copies = {id(tensor): copied(tensor.detach(), device) for tensor in held}
        # Before FSDP2 reads them: it pads parts of unequal size as it takes them over.
        self._wait_for(device)
        self._module._apply(lambda tensor: copies.get(id(tensor), tensor))

    def _wait_for(self, device: torch.device) -> None:
        """Wait until copies in CPU memory can be read; those on the GPU are ordered by its stream."""
        if device.type == "cpu" and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _parts(optimizer: torch.optim.Optimizer) -> Generator[list[nn.Parameter]]:
    """Yield all parameters in order, those with moments of at least ``_MOVED_AT_ONCE`` bytes together."""
    chosen, size = [], 0
    for parameter in (member for group in optimizer.param_groups for member in group["params"]):
        chosen.append(parameter)
        size += 2 * part(parameter).nbytes
        if size >= _MOVED_AT_ONCE:
            yield chosen
            chosen, size = [], 0
    if chosen:
        yield chosen


def _step(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], moments: list[dict[str, Tensor]]
) -> None:
    """Take the step of ``parameters`` alone, with ``moments`` in place of those in the optimizer's state."""
    groups, state = [group["params"] for group in optimizer.param_groups], dict(optimizer.state)
    chosen = {id(parameter) for parameter in parameters}
    for group, members in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [member for member in members if id(member) in chosen]
    optimizer.state.update(zip(parameters, moments, strict=True))
    try:
        optimizer.step()
    finally:
        optimizer.state.update(state)
        for group, members in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = members


def _leave(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], moments: list[dict[str, Tensor]]
) -> None:
    """Begin to copy moments from the device into the optimizer's state."""
    for parameter, named in zip(parameters, moments, strict=True):
        for name, tensor in named.items():
            optimizer.state[parameter][name].copy_(tensor, non_blocking=True)
