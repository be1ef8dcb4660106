"""Moments that pass through the device in parts, here copies in CPU memory, against a plain step."""

from __future__ import annotations

import weakref
from unittest import mock

import torch
from torch import nn

from strop.engines.torch import offload
from strop.engines.torch.offload import Offload
from strop.engines.torch.state import materialize

WIDTH, LAYERS = 16, 9
LAYER_BYTES = 2 * 4 * WIDTH * WIDTH


def trained(*, offloads: bool):
    """A model after three steps; bytes of moments on the device before each part's step."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1, fused=True)
    parked = Offload(module, optimizer, torch.device("cpu"))
    parked._moments = offloads
    alive, sizes = [], []

    def copied(tensor, device):
        copy = tensor.clone()
        alive.append(weakref.ref(copy))
        return copy

    def step(*arguments):
        sizes.append(sum(copy.nbytes for ref in alive if (copy := ref()) is not None and copy.dim()))
        taken(*arguments)

    taken, stream = offload._step, mock.Mock(wraps=torch.cpu.Stream)
    with (
        mock.patch.multiple(offload, copied=copied, _step=step, _MOVED_AT_ONCE=2 * LAYER_BYTES),
        mock.patch.object(torch.cpu, "Stream", stream),
    ):
        materialize(optimizer, parked.parked_moments)
        waiting = [id(tensor) for state in optimizer.state.values() for tensor in state.values()]
        alive.clear()
        for _ in range(3):
            module(torch.randn(4, WIDTH)).square().mean().backward()
            parked.step()
            optimizer.zero_grad()
    assert stream.call_count == 2 * offloads  # the same in every step: free memory is of a stream
    moments = [tensor for state in optimizer.state.values() for tensor in state.values()]
    assert [id(tensor) for tensor in moments] == waiting
    assert [len(group["params"]) for group in optimizer.param_groups] == [LAYERS]
    return [*module.parameters(), *moments], sizes


def test_moments_that_pass_in_parts_change_no_bit_and_two_parts_are_on_the_device():
    (expected, none), (found, sizes) = trained(offloads=False), trained(offloads=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert none == []
    parts = [2 * LAYER_BYTES] * (LAYERS // 2) + [LAYER_BYTES]
    assert sizes == 3 * [here + ahead for here, ahead in zip(parts, [*parts[1:], 0], strict=True)]
