"""Keep parameters or optimizer state in CPU memory between the phases that use them.

Gradients need no such place: they live from the backward passes of an update to its step only.
"""

from __future__ import annotations

import torch
from torch import nn

from strop.engines.settings import OffloadSettings


class Offload:
    """Moves a module and its optimizer's moments between the device and the CPU."""

    def __init__(
        self,
        settings: OffloadSettings,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
    ) -> None:
        self._parameters = settings.parameters and device.type != "cpu"
        self._moments = settings.optimizer and device.type != "cpu"
        self._module, self._optimizer, self._device = module, optimizer, device

    def bring_parameters(self) -> None:
        """To the device, if they are not there."""
        if self._parameters:
            self._module.to(self._device)

    def park_parameters(self) -> None:
        """To the CPU, if they are to wait there."""
        if self._parameters:
            self._module.to("cpu")

    def bring_moments(self) -> None:
        """To the device, if they are not there."""
        if self._moments:
            self._move_moments(self._device)

    def park_moments(self) -> None:
        """To the CPU, if they are to wait there."""
        if self._moments:
            self._move_moments(torch.device("cpu"))

    def _move_moments(self, device: torch.device) -> None:
        if self._optimizer is None:
            return
        for moments in self._optimizer.state.values():
            for name, tensor in moments.items():
                moments[name] = tensor.to(device)
