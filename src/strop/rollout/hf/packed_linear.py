"""Linear layers with weights in oneDNN's blocked layout, for the length of one ``generate`` on a CPU.

The plain matrix product reorders the weights at every call, which is expensive for a decoding step of a few
rows: packed weights are 1.2 times faster with 64 rows and 1.5 to 4 times with 16 or fewer, in float32 and
bfloat16. They are packed from the trainer's weights at the start of a call and dropped at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from strop.torch_private import blocked, blocked_linear, multiplies_bfloat16

_SMALLEST = 1 << 17
"""Smallest weight in elements; below it the packed product's fixed cost (10 us) exceeds the gain.

With half of it generation of a 5M model took 1.03 (16 rows) and 1.09 (64 rows) of the time.
"""
_ROWS_HINT = 16
"""Number of rows that the layout is chosen for; 1 to 64 give the same layouts."""


@contextmanager
def packed_linears(model: nn.Module, compute_dtype: torch.dtype | None) -> Generator[list[nn.Linear]]:
    """Let every large ``nn.Linear`` of ``model`` compute with a packed copy of its weight in the body.

    Yields these layers. ``compute_dtype`` is the dtype of products, None: that of the weights. Layers on
    another device, sharded, patched or of another type are skipped.
    """
    packed: list[nn.Linear] = []
    try:
        for module in model.modules():
            if type(module) is nn.Linear and _packable(module, compute_dtype or module.weight.dtype):
                # An instance attribute shadows the method until it is deleted.
                module.forward = _packed_forward(module, compute_dtype or module.weight.dtype)
                packed.append(module)
        yield packed
    finally:
        for module in packed:
            del module.forward


def _packable(module: nn.Linear, dtype: torch.dtype) -> bool:
    weight = module.weight
    return (
        weight.device.type == "cpu"
        and type(weight) is nn.Parameter  # not a DTensor or another subclass
        and weight.numel() >= _SMALLEST
        and "forward" not in vars(module)
        and torch.backends.mkldnn.is_available()
        and (dtype == torch.float32 or (dtype == torch.bfloat16 and multiplies_bfloat16()))
    )


def _packed_forward(module: nn.Linear, dtype: torch.dtype) -> Callable[..., Tensor]:
    weight = blocked(module.weight.detach().to(dtype), _ROWS_HINT)
    bias = None if module.bias is None else module.bias.detach().to(dtype)

    def forward(input: Tensor) -> Tensor:
        return blocked_linear(input.to(dtype), weight, bias)

    return forward
