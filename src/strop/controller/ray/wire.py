"""Messages between processes: tensors as numpy arrays, which Ray sends out of band and without a copy.

A value is packed into a ``Packed``: the arrays of its tensors, and the value itself with a ``Slot`` in place
of each tensor. A tensor in the object store (``RemoteTensor``) is sent as references to the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from strop.controller.ray.handles import Columns, RemoteTensor, RemoteValue, to_array, to_tensor
from strop.protocol import DataProto


@dataclass(frozen=True)
class Slot:
    """Placeholder of a tensor: the number of its array, and its dtype (numpy has no bfloat16)."""

    array: int
    dtype: torch.dtype


@dataclass(frozen=True)
class RemoteSlot:
    """Placeholder of a tensor with rows in the object store: ``Layout.pieces`` by number of object."""

    column: str
    pieces: list[tuple[int, np.ndarray | None]]
    order: np.ndarray | None


@dataclass(frozen=True)
class ValueSlot:
    """Placeholder of a value that is one object of the store."""

    object: int


@dataclass
class Packed:
    """A value with placeholders for its tensors, and the arrays of these tensors."""

    value: Any = None
    arrays: list[np.ndarray] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Total bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)


def pack(value: Any) -> tuple[Packed, list[Any]]:
    """Return ``value`` for sending, and the object references that must be sent with it."""
    packed = Packed()
    numbers: dict[Any, int] = {}

    def number_of(reference: Any) -> int:
        # columns of a batch share objects: each is sent once
        return numbers.setdefault(reference, len(numbers))

    def replace(leaf: Any) -> Any:
        if isinstance(leaf, RemoteValue):
            return ValueSlot(number_of(leaf.reference))
        if isinstance(leaf, RemoteTensor):
            pieces, order = leaf.source.pieces
            name = leaf.column
            return RemoteSlot(name, [(number_of(part.reference(name)), rows) for part, rows in pieces], order)
        if isinstance(leaf, Tensor):
            packed.arrays.append(to_array(leaf))
            return Slot(len(packed.arrays) - 1, leaf.dtype)
        return leaf

    packed.value = _map_leaves(replace, value)
    return packed, list(numbers)


def unpack(packed: Packed, objects: tuple[Any, ...]) -> Any:
    """Restore a value; ``objects`` are the fetched references that ``pack`` returned."""

    def restore(leaf: Any) -> Any:
        match leaf:
            case Slot(array, dtype):
                return to_tensor(packed.arrays[array], dtype)
            case RemoteSlot(column, pieces, order):
                rows = torch.cat([_rows_of(objects[number], column, rows) for number, rows in pieces])
                return rows if order is None else rows[torch.from_numpy(order)]
            case ValueSlot(number):
                return unpack(objects[number], ())
        return leaf

    return _map_leaves(restore, packed.value)


def _rows_of(columns: Columns, name: str, rows: np.ndarray | None) -> Tensor:
    array, dtype = columns[name]
    tensor = to_tensor(array, dtype)
    return tensor if rows is None else tensor[torch.from_numpy(rows)]


def _map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, DataProto):
        columns = {name: function(tensor) for name, tensor in value.batch.items()}
        meta = _map_leaves(function, value.meta_info)
        # not a DataProto, whose columns have a length
        return _Batch(columns, value.non_tensor_batch, meta)
    if isinstance(value, _Batch):
        columns = {name: function(slot) for name, slot in value.columns.items()}
        return DataProto(columns, value.non_tensor_batch, _map_leaves(function, value.meta_info))
    if isinstance(value, dict):
        return {name: _map_leaves(function, item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map_leaves(function, item) for item in value)
    return function(value)


@dataclass(frozen=True)
class _Batch:
    """A ``DataProto`` in transit, with placeholders for tensors."""

    columns: dict[str, Any]
    non_tensor_batch: dict[str, np.ndarray]
    meta_info: dict[str, Any]
