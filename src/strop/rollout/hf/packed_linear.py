"""Linear layers with weights in oneDNN's blocked layout, for the length of one ``generate`` on a CPU.

The plain matrix product reorders the weights at every call, which is expensive for a decoding step of a few
rows: packed weights are 1.2 times faster with 64 rows and 1.5 to 4 times with 16 or fewer, in float32 and
bfloat16. They are packed from the trainer's weights at the start of a call and dropped at its end.

Layers of one input (queries, keys and values; gate and up) share one product: at the sizes of a decoding step
a call costs as much as the arithmetic.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from strop.torch_private import blocked, blocked_linear, multiplies_bfloat16, writes_in_place

_SMALLEST = {torch.float32: 1 << 17, torch.bfloat16: 1 << 14}
"""Smallest weight in elements, in a group that of its largest: below it the fixed cost (20 us in float32) is
above the gain."""
_ROWS_HINT = 16
"""Number of rows that the layout is chosen for; 1 to 64 give the same layouts."""


@contextmanager
def layers_of_one_input(model: nn.Module) -> Generator[list[list[nn.Linear]]]:
    """Find the linear layers that get the same tensor in the passes of the body.

    The list is filled at the end. A layer that gets an input with some layers once, and with others another
    time, is in none of its groups.
    """
    groups: list[list[nn.Linear]] = []
    noted: list[list[nn.Linear]] = []
    latest: dict[int, tuple[weakref.ref[Tensor], int, list[nn.Linear]]] = {}

    def note(module: nn.Linear, given: tuple[Any, ...]) -> None:
        for input in given[:1]:
            known = latest.get(id(input))
            # the id of a tensor is given again after its end; what was overwritten is another input
            if known is None or known[0]() is not input or known[1] != writes_in_place(input):
                noted.append([])
                known = latest[id(input)] = weakref.ref(input), writes_in_place(input), noted[-1]
            known[2].append(module)

    hooks = [
        module.register_forward_pre_hook(note) for module in model.modules() if type(module) is nn.Linear
    ]
    try:
        yield groups
    finally:
        for hook in hooks:
            hook.remove()
    different = {tuple(map(id, group)): group for group in noted}
    uses = Counter(chain.from_iterable(different))
    groups += [
        group
        for ids, group in different.items()
        if len(group) > 1 and all(uses[number] == 1 for number in ids)
    ]


@contextmanager
def packed_linears(
    model: nn.Module, compute_dtype: torch.dtype | None, groups: Sequence[Sequence[nn.Linear]] = ()
) -> Generator[list[nn.Linear]]:
    """Let every large ``nn.Linear`` of ``model`` compute with a packed copy of its weight in the body.

    Yields these layers. ``compute_dtype`` is the dtype of products, None: that of the weights. ``groups`` are
    those of ``layers_of_one_input``. Layers on another device, sharded, patched or of another type are
    skipped.
    """
    packed: list[nn.Linear] = []
    try:
        joined = {id(module) for group in groups for module in group}
        alone = [
            [module] for module in model.modules() if type(module) is nn.Linear and id(module) not in joined
        ]
        for group in [*groups, *alone]:
            dtype = compute_dtype or group[0].weight.dtype
            if _packable(group, dtype):
                product = _Product(group, dtype)
                for number, module in enumerate(group):
                    # An instance attribute shadows the method until it is deleted.
                    module.forward = partial(product, number)
                    packed.append(module)
        yield packed
    finally:
        for module in packed:
            del module.forward


def _packable(group: Sequence[nn.Linear], dtype: torch.dtype) -> bool:
    return (
        dtype in _SMALLEST
        and max(module.weight.numel() for module in group) >= _SMALLEST[dtype]
        and all(
            module.weight.device.type == "cpu"
            and module.weight.dtype == group[0].weight.dtype
            and type(module.weight) is nn.Parameter  # not a DTensor or another subclass
            and "forward" not in vars(module)
            for module in group
        )
        and torch.backends.mkldnn.is_available()
        and (dtype == torch.float32 or multiplies_bfloat16())
    )


class _Product:
    """The outputs of linear layers of one input, computed when the first of them is asked for."""

    def __init__(self, layers: Sequence[nn.Linear], dtype: torch.dtype) -> None:
        self._dtype = dtype
        weights = [layer.weight.detach().to(dtype) for layer in layers]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]  # the output layer's may be large
        self._weight = blocked(weight, _ROWS_HINT)
        self._sizes = [layer.out_features for layer in layers]
        self._bias = None
        if any(layer.bias is not None for layer in layers):
            self._bias = weight.new_zeros(len(weight))
            for layer, bias in zip(layers, self._bias.split(self._sizes), strict=True):
                if layer.bias is not None:
                    bias.copy_(layer.bias.detach())
        self._input: Tensor | None = None
        self._version = 0
        self._outputs: dict[int, Tensor] = {}
        """Of the layers that have not been asked since."""

    def __call__(self, number: int, input: Tensor) -> Tensor:
        is_known = input is self._input and writes_in_place(input) == self._version
        if number not in self._outputs or not is_known:
            whole = blocked_linear(input.to(self._dtype), self._weight, self._bias)
            if len(self._sizes) == 1:
                return whole
            self._input, self._version = input, writes_in_place(input)
            self._outputs = dict(enumerate(whole.split(self._sizes, -1)))
        output = self._outputs.pop(number)
        if not self._outputs:
            self._input = None
        return output
