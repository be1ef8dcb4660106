from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torch import Tensor

from strop.controller.ray.wire import pack, unpack
from strop.protocol import DataProto

from builders import random_samples

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]


def _through(value):
    packed, objects = pack(value)
    assert objects == []
    return unpack(pickle.loads(pickle.dumps(packed)), ())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (4,), (2, 3, 5)])
def test_a_tensor_of_every_dtype_and_shape_arrives_as_it_was(dtype, shape):
    tensor = (torch.randn(shape) * 3).to(dtype)
    arrived = _through(tensor)
    assert (arrived.dtype, arrived.shape) == (dtype, tensor.shape)
    assert torch.equal(arrived, tensor)


def test_special_numbers_keep_their_bits():
    tensor = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40]).bfloat16()
    assert torch.equal(_through(tensor).view(torch.int16), tensor.view(torch.int16))


def test_a_tensor_that_is_not_contiguous_or_needs_a_gradient_arrives():
    tensor = torch.arange(12.0).reshape(3, 4).T.requires_grad_()
    assert torch.equal(_through(tensor), tensor.detach())


def test_a_batch_arrives_with_its_objects_and_facts_wherever_it_stands():
    batch = random_samples(4).union(
        DataProto.from_dict(
            {"scores": torch.randn(4).bfloat16()},
            {"truth": ["1", {"a": [1, 2]}, None, [3]], "uid": list("abcd")},
            {"mode": "train", "weights": {"w": [torch.arange(3), ("x", torch.ones(2).bfloat16())]}},
        )
    )
    (arrived, nothing), rest = _through(((batch, None), {"bucket": [torch.eye(2)]}))
    assert isinstance(arrived, DataProto)
    assert arrived.batch.keys() == batch.batch.keys()
    assert all(torch.equal(arrived.batch[name], column) for name, column in batch.batch.items())
    assert arrived.non_tensor_batch["truth"].tolist() == ["1", {"a": [1, 2]}, None, [3]]
    assert arrived.non_tensor_batch["uid"].dtype == object
    assert arrived.meta_info["mode"] == "train"
    first, second = arrived.meta_info["weights"]["w"]
    assert torch.equal(first, torch.arange(3))
    assert type(second) is tuple
    assert torch.equal(second[1], torch.ones(2).bfloat16())
    assert nothing is None
    assert torch.equal(rest["bucket"][0], torch.eye(2))


def test_the_bytes_counted_are_those_of_the_tensors():
    packed, _ = pack({"a": torch.zeros(5, dtype=torch.bfloat16), "b": [torch.zeros(3)], "c": "text"})
    assert packed.nbytes == 5 * 2 + 3 * 4


def test_the_arrays_leave_the_pickle_out_of_band():
    packed, _ = pack(random_samples(64))
    buffers: list[pickle.PickleBuffer] = []
    inside = pickle.dumps(packed, protocol=5, buffer_callback=buffers.append)
    assert sum(len(buffer.raw()) for buffer in buffers) == packed.nbytes
    assert len(inside) < 4000


def test_tensors_arrive_as_views_of_the_arrays_and_not_as_copies():
    packed, _ = pack(torch.arange(4))
    arrived: Tensor = unpack(packed, ())
    assert np.shares_memory(arrived.numpy(), packed.arrays[0])
