"""Columns of a micro-batch, on a device and on the CPU.

Layouts of packed rows are computed on the CPU, and their indices are sent to the device: a program that
reads a number from a GPU, such as how many tokens a mask keeps, waits for all work queued there before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor


class MicroBatch(Mapping[str, Tensor]):
    """Columns of a micro-batch on a device; ``on_cpu`` has the same columns on the CPU.

    Not a dictionary, which FSDP2 would replace by one without ``on_cpu``.
    """

    def __init__(self, on_cpu: Mapping[str, Tensor], on_device: Mapping[str, Tensor]) -> None:
        self.on_cpu, self._on_device = on_cpu, on_device

    @classmethod
    def on(cls, device: torch.device, columns: Mapping[str, Tensor]) -> MicroBatch:
        """Send columns on the CPU to ``device``."""
        return cls(columns, {name: send(column, device) for name, column in columns.items()})

    def converted(self, function: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]) -> MicroBatch:
        """Return what ``function`` makes of the columns."""
        return MicroBatch(function(self.on_cpu), function(self._on_device))

    def __getitem__(self, name: str) -> Tensor:
        return self._on_device[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._on_device)

    def __len__(self) -> int:
        return len(self._on_device)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor on the CPU to ``device``, without waiting for work that was queued there before."""
    if device.type != "cpu":  # torch copies others to contiguous memory first, which is not pinned
        tensor = tensor.contiguous()
    if device.type == "cuda":  # a copy from memory that is not pinned waits
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def on_cpu(batch: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a column on the CPU; copied from the device if ``batch`` is no ``MicroBatch``."""
    return batch.on_cpu[name] if isinstance(batch, MicroBatch) else batch[name].cpu()


def places_of(chosen: Tensor, device: torch.device) -> Tensor:
    """Return on ``device`` the flat indices [n] of the True entries of a tensor on the CPU."""
    return send(chosen.flatten().nonzero()[:, 0], device)
