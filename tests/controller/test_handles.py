"""A ``RemoteTensor`` is a tensor to the trainer, and fetches nothing until its numbers are needed."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor

from strop.controller.ray.handles import Layout, RemoteColumns, RemoteTensor, to_array
from strop.controller.ray.wire import pack, unpack
from strop.protocol import DataProto

ROWS = (3, 1, 4)


class Store:
    """Columns of three ranks, and which of these were fetched."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.plain = {
            "values": torch.randn(sum(ROWS), 5, generator=generator),
            "ids": torch.randint(0, 9, (sum(ROWS), 5), generator=generator),
            "mask": torch.rand(sum(ROWS), 5, generator=generator) > 0.4,
            "scores": torch.randn(sum(ROWS), generator=generator).bfloat16(),
        }
        self.fetched: list[int] = []
        split = {name: column.split(ROWS) for name, column in self.plain.items()}
        self.objects = [
            {name: (to_array(split[name][rank]), column.dtype) for name, column in self.plain.items()}
            for rank in range(len(ROWS))
        ]
        self.by_rank = self.results()
        self.batch = DataProto.concat(self.by_rank)

    def results(self) -> list[DataProto]:
        """Return the results of one call to the ranks."""
        parts = [RemoteColumns(rank, rank, rows, self._fetch, {}, set()) for rank, rows in enumerate(ROWS)]
        layouts = [Layout([part]) for part in parts]
        return [
            DataProto(
                {
                    name: RemoteTensor.of(name, layout, row_shape=column.shape[1:], dtype=column.dtype)
                    for name, column in self.plain.items()
                },
                {"name": np.array([f"{rank}.{row}" for row in range(ROWS[rank])], dtype=object)},
            )
            for rank, layout in enumerate(layouts)
        ]

    def _fetch(self, references: dict[int, int]):
        self.fetched.extend(references)
        return {rank: self.objects[reference] for rank, reference in references.items()}


@pytest.fixture
def store() -> Store:
    return Store()


def test_results_of_two_calls_are_joined(store):
    twice = DataProto.concat([store.batch, *store.results()])
    assert torch.equal(twice.batch["values"].fetch(), torch.cat([store.plain["values"]] * 2))
    assert store.fetched == [0, 1, 2, 0, 1, 2]  # each of its own object


OPERATIONS = {
    "add": lambda t: t + 1.5,
    "right operand": lambda t: 2 - t,
    "between two": lambda t: t * t.flip(0),
    "sum": lambda t: t.sum(),
    "var and mean": lambda t: torch.var_mean(t.float())[0],
    "item": lambda t: torch.tensor(t.float().sum().item()),
    "float": lambda t: torch.tensor(float(t.float().flatten()[0])),
    "tolist": lambda t: torch.tensor(t.float().tolist()),
    "numpy": lambda t: torch.from_numpy(t.float().numpy().copy()),
    "np.asarray": lambda t: torch.from_numpy(np.asarray(t.float()).copy()),
    "iterate": lambda t: torch.stack([row.float().sum() for row in t]),
    "transpose": lambda t: t.transpose(0, -1),
    "one row": lambda t: t[2],
    "last row": lambda t: t[-1],
    "rows": lambda t: t[1:6],
    "every second row": lambda t: t[::2],
    "rows by tensor": lambda t: t[torch.tensor([5, 0, 5, -1])],
    "rows by list": lambda t: t[[4, 2]],
    "rows by mask": lambda t: t[torch.arange(len(t)) % 3 == 0],
    "elements by mask": lambda t: t[t > 0],
    "ellipsis": lambda t: t[..., 0],
    "rows and columns": lambda t: t[1:3, ...],
    "cat": lambda t: torch.cat([t, t]),
    "cat of rows": lambda t: torch.cat([t[5:], t[:2], t]),
    "cat with plain": lambda t: torch.cat([t, torch.zeros_like(t)]),
    "cat of columns": lambda t: torch.cat([t, t], dim=-1),
    "split": lambda t: torch.cat([piece.flip(0) for piece in t.split(3)]),
    "repeat_interleave": lambda t: t.repeat_interleave(3, dim=0),
    "repeat_interleave by tensor": lambda t: t.repeat_interleave(torch.arange(len(t)), dim=0),
    "repeat_interleave flat": lambda t: t.repeat_interleave(2),
    "repeat": lambda t: t.repeat(2, *[1] * (t.dim() - 1)),
    "repeat beyond": lambda t: t.repeat(2, *[3] * t.dim()),
    "zeros_like": lambda t: torch.zeros_like(t),
    "deepcopy": lambda t: copy.deepcopy(t),
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "sum by keyword": lambda t: torch.sum(input=t),
    "stack by keyword": lambda t: torch.stack(tensors=[t, t]),
    "cat by keyword": lambda t: torch.cat(tensors=[t, t]),
    "where by keyword": lambda t: torch.where(condition=t > 0, input=t, other=torch.zeros_like(t)),
    "repeat_interleave by keyword": lambda t: t.repeat_interleave(repeats=2, dim=0),
    "matmul": lambda t: t.float().reshape(len(t), -1).T @ t.float().reshape(len(t), -1),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("column", ["values", "ids", "mask", "scores"])
def test_an_operation_gives_what_it_gives_on_the_plain_tensor(store, name, column):
    operation = OPERATIONS[name]
    try:
        expected = operation(store.plain[column])
    except (RuntimeError, IndexError, TypeError) as error:  # torch refuses it: then here as well
        with pytest.raises(type(error)):
            operation(store.batch.batch[column])
        return
    result = operation(store.batch.batch[column])
    result = result.fetch() if isinstance(result, RemoteTensor) else result
    assert type(result) is Tensor
    assert result.dtype == expected.dtype
    assert torch.equal(result, expected)


def test_metadata_of_a_tensor_needs_no_bytes(store):
    tensor, plain = store.batch.batch["values"], store.plain["values"]
    assert isinstance(tensor, Tensor)
    assert tensor.shape == plain.shape
    assert tensor.size() == plain.size()
    assert tensor.size(1) == tensor.shape[1] == 5
    assert (tensor.dtype, tensor.device, tensor.ndim, tensor.dim()) == (torch.float32, plain.device, 2, 2)
    assert (len(tensor), tensor.numel(), tensor.element_size()) == (8, 40, 4)
    assert not tensor.requires_grad
    assert store.fetched == []


def _row_operations(batch: DataProto) -> list[DataProto]:
    return [
        batch[2:7],
        batch[torch.tensor([7, 0, 3])],
        batch[[1, 1]],
        batch[torch.arange(8) > 4],
        *batch.split(3),
        *batch.chunk(4),
        batch.repeat(2),
        batch.repeat(3, interleave=False),
        batch.reorder([7, 6, 5, 4, 3, 2, 1, 0]),
        DataProto.concat(batch.split(3)),
        DataProto.concat([batch[5:], batch[:1], batch]).repeat(2)[::3],
    ]


def test_taking_rows_repeating_and_joining_fetch_nothing(store):
    batch = store.batch
    batch = batch.union(DataProto.from_dict({"own": torch.arange(8)})).select("values", "mask", "name")
    steps = _row_operations(batch)
    assert store.fetched == []
    plain = DataProto({name: store.plain[name] for name in ("values", "mask")}, batch.non_tensor_batch)
    expected = _row_operations(plain)
    for result, wanted in zip(steps, expected, strict=True):
        assert isinstance(result.batch["values"], RemoteTensor)
        assert torch.equal(result.batch["values"], wanted.batch["values"])
        assert torch.equal(result.batch["mask"], wanted.batch["mask"])
        assert list(result.non_tensor_batch["name"]) == list(wanted.non_tensor_batch["name"])
    assert sorted(store.fetched) == [0, 1, 2]  # each rank's columns together, and once


def test_union_with_the_same_column_compares_nothing_that_is_the_same_object(store):
    assert isinstance(store.batch.union(store.batch).batch["values"], RemoteTensor)
    assert store.fetched == []


@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.add_(1),
        lambda t: t.zero_(),
        lambda t: t.__setitem__(0, 0),
        lambda t: t.__iadd__(1),
        lambda t: t.__imul__(2),
        lambda t: t.masked_fill_(t > 0, 0),
        lambda t: t[2:4].fill_(1),
        lambda t: t[torch.tensor([0])].copy_(torch.zeros(1, 5)),
        lambda t: torch.add(t, 1, out=t),
        lambda t: torch.nn.functional.relu(t, inplace=True),
    ],
)
def test_nothing_writes_into_a_workers_batch(store, write):
    before = store.plain["values"].clone()
    with pytest.raises(RuntimeError, match="clone"):
        write(store.batch.batch["values"])
    assert torch.equal(store.batch.batch["values"], before)


def test_a_plain_tensor_may_be_written_with_a_remote_one(store):
    target = torch.zeros(8, 5)
    target.copy_(store.batch.batch["values"])
    target[0] += store.batch.batch["values"][1]
    assert torch.equal(target[0], store.plain["values"][0] + store.plain["values"][1])


def test_a_worker_gets_the_same_rows_without_their_passing_through_the_driver(store):
    """``pack`` sends the places of a remote column's rows; ``unpack`` runs at the worker."""
    order = torch.tensor([7, 0, 3, 3, 1, 6])
    for rows in (slice(None), slice(1, 4), slice(5, None), order, torch.tensor([3]), torch.arange(8).flip(0)):
        packed, references = pack(((store.batch[rows],), {"scale": store.batch.batch["scores"]}))
        assert packed.nbytes == 0
        args, kwargs = unpack(pickle.loads(pickle.dumps(packed)), tuple(store.objects[r] for r in references))
        for name, column in store.plain.items():
            assert type(args[0].batch[name]) is Tensor
            assert torch.equal(args[0].batch[name], column[rows])
        assert torch.equal(kwargs["scale"], store.plain["scores"])
    assert store.fetched == []


def test_only_the_ranks_whose_rows_are_needed_are_read(store):
    _, references = pack(store.batch[torch.tensor([7, 4])])
    assert references == [2]
