"""Moments and parameters that pass through the device, here copies in CPU memory, against a plain step."""

from __future__ import annotations

import gc
import weakref
from unittest import mock

import pytest
import torch
from torch import nn
from torch.cuda import _pin_memory_utils

from strop.engines.torch import offload
from strop.engines.torch.offload import Offload, pinned_like
from strop.engines.torch.state import materialize

WIDTH, LAYERS = 16, 9
LAYER_BYTES = 2 * 4 * WIDTH * WIDTH


def trained(*, offloads: bool, at_once: int = 2 * LAYER_BYTES):
    """A model after three steps; bytes of moments on the device before each part's step.

    Its last layer has no gradient in the second step.
    """
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

    taken = offload._step
    with mock.patch.multiple(offload, copied=copied, _step=step, _MOVED_AT_ONCE=at_once):
        materialize(optimizer, parked.parked_moments)
        waiting = [id(tensor) for state in optimizer.state.values() for tensor in state.values()]
        alive.clear()
        for number in range(3):
            module(torch.randn(4, WIDTH)).square().mean().backward()
            module[-1].weight.grad = None if number == 1 else module[-1].weight.grad
            parked.step()
            optimizer.zero_grad()
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


def test_a_parameter_larger_than_a_part_passes_in_pieces_and_changes_no_bit():
    at_once = LAYER_BYTES * 3 // 8
    (expected, _), (found, sizes) = trained(offloads=False), trained(offloads=True, at_once=at_once)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert max(sizes) == 2 * at_once
    assert len(sizes) == 3 * 3 * LAYERS


def test_a_parameter_without_a_flat_view_passes_whole():
    weight = torch.nn.Parameter(torch.randn(8, 4).t())
    with mock.patch.object(offload, "_MOVED_AT_ONCE", 64):
        (pieces,) = offload._parts(torch.optim.AdamW([weight]))
    assert [piece.of(weight).shape for piece in pieces] == [weight.shape]


def test_all_steps_use_the_same_two_streams():
    with mock.patch.object(torch.cpu, "Stream", wraps=torch.cpu.Stream) as made:
        trained(offloads=True)
    assert made.call_count == 2


@pytest.fixture
def moved():
    """A model whose parameters and buffer wait, with its optimizer and offload."""
    module = nn.Linear(WIDTH, WIDTH)
    module.register_buffer("scale", torch.ones(WIDTH))
    optimizer = torch.optim.AdamW([module.weight], lr=0.01, fused=True)
    parked = Offload(module, optimizer, torch.device("cpu"))
    parked._parameters = True
    with mock.patch.object(offload, "copied", lambda tensor, device: tensor.clone()):
        parked.park_parameters()
        yield module, parked


def passed(module, parked, between=lambda: None):
    """Move the model to the device and back; names of the tensors that were copied back."""
    waiting = {name: tensor.data for name, tensor in module.state_dict().items()}
    before = {name: tensor.clone() for name, tensor in waiting.items()}
    parked.bring_parameters()
    assert all(tensor.data_ptr() != waiting[name].data_ptr() for name, tensor in module.state_dict().items())
    for tensor in waiting.values():
        tensor.fill_(7.0)  # remains where nothing is copied
    between()
    expected = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    parked.park_parameters()
    found = module.state_dict()
    copied = {name for name, tensor in found.items() if torch.equal(tensor, expected[name])}
    for name in found.keys() - copied:
        assert found[name].data_ptr() == waiting[name].data_ptr()
        found[name].data.copy_(before[name])
    return copied


def test_only_parameters_that_changed_are_copied_to_the_cpu(moved):
    module, parked = moved

    def step():
        module(torch.randn(4, WIDTH)).square().mean().backward()
        parked.step()
        module.zero_grad()

    def load():
        with torch.no_grad():
            module.bias.add_(1.0)

    assert passed(module, parked) == set()
    assert passed(module, parked, step) == {"weight"}
    assert passed(module, parked) == set()
    parked._moments = True
    assert passed(module, parked, step) == {"weight"}
    assert passed(module, parked, load) == {"bias"}
    assert passed(module, parked, lambda: module.scale.mul_(2.0)) == {"scale"}
    assert passed(module, parked, lambda: setattr(module, "scale", torch.full((WIDTH,), 3.0))) == {"scale"}
    assert passed(module, parked) == set()


def test_what_is_written_to_waiting_parameters_reaches_the_device(moved):
    module, parked = moved
    with torch.no_grad():
        module.weight.fill_(5.0)
    for _ in range(2):
        parked.bring_parameters()
        parked.bring_parameters()  # after an error in a pass, nothing is parked
        assert torch.equal(module.weight, torch.full((WIDTH, WIDTH), 5.0))
        parked.park_parameters()


def test_pinned_memory_has_the_size_of_its_tensors_and_is_released_with_them(monkeypatch):
    pinned, released = {}, []
    monkeypatch.setattr(_pin_memory_utils, "pin_memory", pinned.__setitem__)
    monkeypatch.setattr(_pin_memory_utils, "unpin_memory", released.append)
    tensors = [
        torch.zeros((3 << 20) + 1, dtype=torch.bfloat16),
        torch.zeros(()),
        torch.zeros(0, 5),
        torch.zeros(5, 3).t(),
    ]
    found = pinned_like(tensors, torch.device("cuda"))
    ((start, size),) = pinned.items()
    assert sum(tensor.nbytes for tensor in tensors) <= size < sum(tensor.nbytes + 64 for tensor in tensors)
    for number, (ours, given) in enumerate(zip(found, tensors, strict=True)):
        assert (ours.shape, ours.dtype, ours.stride()) == (given.shape, given.dtype, given.stride())
        assert ours.untyped_storage().nbytes() == given.nbytes  # a storage of its own
        ours.fill_(number)
        assert not given.numel() or start <= ours.data_ptr() < start + size
    assert all((ours == number).all() for number, ours in enumerate(found))
    del found[1:], ours
    gc.collect()
    assert released == []
    found.clear()
    assert released == [start]
    assert pinned_like([torch.zeros(0)], torch.device("cuda"))[0].numel() == 0
