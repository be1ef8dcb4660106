"""DataProto: the container that moves between the trainer and its workers.

A batch of B rows is a plain dict of tensors (first dimension B), a dict of object columns (length B) and a
dict of facts about the batch as a whole. Plain dicts were measured against tensordict: no gain, and a slow
import.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

RowIndex: TypeAlias = "slice | Sequence[int] | Tensor | np.ndarray"


def _object_column(values: Sequence[Any] | np.ndarray) -> np.ndarray:
    """Return a 1-D object array; ``np.array`` would turn equal-length lists into a matrix."""
    if isinstance(values, np.ndarray) and values.dtype == object and values.ndim == 1:
        return values
    column = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        column[row] = value
    return column


class TensorColumns(dict[str, "Tensor"]):
    """Tensors [B, ...] by name, with the size that a TensorDict of them would have."""

    @property
    def batch_size(self) -> torch.Size:
        """``[B]``; ``[0]`` without a column."""
        return torch.Size([next(map(len, self.values()), 0)])

    def __setitem__(self, name: str, column: Any) -> None:
        # the output of a reward manager, of verl's a mapping, stands for its scores
        if isinstance(column, Mapping):
            column = column.get("reward_tensor", column)
        scores = column if torch.is_tensor(column) else getattr(column, "token_level_scores", column)
        super().__setitem__(name, scores)


@dataclass
class DataProtoItem:
    """One row of a ``DataProto``: tensors without the row dimension, and objects."""

    batch: dict[str, Tensor] = field(default_factory=dict)
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataProto:
    """B rows: ``batch`` (tensors [B, ...]), ``non_tensor_batch`` (object arrays [B]) and ``meta_info``.

    ``data[i]`` and iteration give rows as ``DataProtoItem``, all other indices a ``DataProto``.

    Raises ``ValueError`` at construction if the columns differ in length. Operations return new
    containers and share storage where they can; tensors are never modified in place.
    """

    batch: dict[str, Tensor] = field(default_factory=TensorColumns)
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.batch = TensorColumns(self.batch)
        lengths = {name: len(column) for name, column in self._columns()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"DataProto: columns differ in length: {lengths}")

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Sequence[Any] | np.ndarray] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> DataProto:
        """Build from any mappings; lists become object columns."""
        columns = {name: _object_column(values) for name, values in (non_tensors or {}).items()}
        return cls(dict(tensors or {}), columns, dict(meta_info or {}))

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any] | DataProto, meta_info: Mapping[str, Any] | None = None
    ) -> DataProto:
        """Build from one mapping of columns: tensors, and objects. A ``DataProto`` is returned as it is."""
        if isinstance(data, DataProto):
            return data
        tensors = {name: column for name, column in data.items() if torch.is_tensor(column)}
        objects = {name: column for name, column in data.items() if name not in tensors}
        return cls.from_dict(tensors, objects, meta_info)

    def __len__(self) -> int:
        for _, column in self._columns():
            return len(column)
        return 0

    def __contains__(self, name: str) -> bool:
        return name in self.batch or name in self.non_tensor_batch

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self[row] for row in range(len(self)))

    @overload
    def __getitem__(self, rows: int | np.integer) -> DataProtoItem: ...

    @overload
    def __getitem__(self, rows: RowIndex) -> DataProto: ...

    def __getitem__(self, rows: int | np.integer | RowIndex) -> DataProto | DataProtoItem:
        """Return rows by slice, list, LongTensor or bool mask, or one row by its number."""
        if isinstance(rows, int | np.integer):
            if not -len(self) <= rows < len(self):
                raise IndexError(f"DataProto: row {rows} of {len(self)}")
            columns = {name: column[rows] for name, column in self.non_tensor_batch.items()}
            return DataProtoItem(
                {name: t[int(rows)] for name, t in self.batch.items()}, columns, self.meta_info
            )
        if isinstance(rows, slice):
            return self._map(lambda t: t[rows], lambda a: a[rows])
        index = torch.as_tensor(rows)
        if index.dtype == torch.bool:
            # row numbers: one index for tensors on any device and for arrays
            index = index.nonzero().flatten()
        index = index.to(torch.long)
        host_index = index.cpu().numpy()
        return self._map(lambda t: t[index.to(t.device)], lambda a: a[host_index])

    def union(self, other: DataProto) -> DataProto:
        """Return the columns of both; ``ValueError`` names a column that differs between them."""
        if len(self) and len(other) and len(self) != len(other):
            raise ValueError(f"DataProto.union: {len(self)} rows and {len(other)} rows")
        for name in self.batch.keys() & other.batch.keys():
            mine, theirs = self.batch[name], other.batch[name]
            # identity first: a comparison would fetch the bytes of a RemoteTensor
            if mine is not theirs and not (mine.shape == theirs.shape and torch.equal(mine, theirs)):
                raise ValueError(f"DataProto.union: both have a column {name!r} and they differ")
        for name in self.non_tensor_batch.keys() & other.non_tensor_batch.keys():
            mine, theirs = self.non_tensor_batch[name], other.non_tensor_batch[name]
            if mine is not theirs and list(mine) != list(theirs):
                raise ValueError(f"DataProto.union: both have a column {name!r} and they differ")
        return DataProto(
            {**self.batch, **other.batch},
            {**self.non_tensor_batch, **other.non_tensor_batch},
            {**self.meta_info, **other.meta_info},
        )

    def select(
        self,
        *names: str,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
    ) -> DataProto:
        """Return the named columns; ``KeyError`` lists missing and existing names.

        With ``batch_keys`` or ``non_tensor_batch_keys`` alone, all columns of the other kind are returned.
        """
        if batch_keys is not None or non_tensor_batch_keys is not None:
            tensors = self.batch if batch_keys is None else batch_keys
            objects = self.non_tensor_batch if non_tensor_batch_keys is None else non_tensor_batch_keys
            names = (*names, *tensors, *objects)
        missing = [name for name in names if name not in self]
        if missing:
            raise KeyError(
                f"DataProto has no column {missing}; it has {[name for name, _ in self._columns()]}"
            )
        return DataProto(
            {name: self.batch[name] for name in names if name in self.batch},
            {name: self.non_tensor_batch[name] for name in names if name in self.non_tensor_batch},
            dict(self.meta_info),
        )

    def pop(
        self,
        *names: str,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
    ) -> DataProto:
        """Remove the named columns, of all three arguments, and return them in a new container."""
        names = (*names, *(batch_keys or ()), *(non_tensor_batch_keys or ()))
        taken = self.select(*names)
        for name in names:
            self.batch.pop(name, None)
            self.non_tensor_batch.pop(name, None)
        return taken

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> DataProto:
        """Rename columns of tensors in this container, and return it; ``KeyError`` for one that is absent."""
        olds, news = ([keys] if isinstance(keys, str) else keys for keys in (old_keys, new_keys))
        names = dict(zip(olds, news, strict=True))
        if absent := sorted(names.keys() - self.batch.keys()):
            raise KeyError(f"DataProto has no tensors {absent}; it has {list(self.batch)}")
        self.batch = TensorColumns({names.get(name, name): t for name, t in self.batch.items()})
        return self

    def repeat(self, repeat_times: int, interleave: bool = True) -> DataProto:
        """Repeat every row: adjacent (``interleave``), or the whole batch after itself."""
        n = repeat_times
        if interleave:
            return self._map(lambda t: t.repeat_interleave(n, dim=0), lambda a: np.repeat(a, n))
        return self._map(lambda t: t.repeat(n, *[1] * (t.dim() - 1)), lambda a: np.tile(a, n))

    def reorder(self, indices: Sequence[int] | Tensor) -> DataProto:
        """Return the rows in another order."""
        return self[indices]

    def split(self, size: int) -> list[DataProto]:
        """Return consecutive pieces of ``size`` rows; the last may be smaller."""
        if size < 1:
            raise ValueError(f"DataProto.split: size {size}, expected at least 1")
        return [self[start : start + size] for start in range(0, len(self), size)]

    def chunk(self, chunks: int) -> list[DataProto]:
        """Return ``chunks`` consecutive parts of equal size; ``ValueError`` if the rows do not divide."""
        if chunks < 1 or len(self) % chunks:
            raise ValueError(f"DataProto.chunk: {len(self)} rows do not divide into {chunks} equal parts")
        return self.split(max(len(self) // chunks, 1))

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[DataProto]:
        """Iterate over mini-batches of equal size, ``epochs`` times.

        ``dataloader_kwargs={"shuffle": True}`` draws a new order every epoch, from ``seed``. Raises
        ``ValueError`` if the rows do not divide.
        """
        if len(self) % mini_batch_size:
            raise ValueError(f"DataProto: {len(self)} rows do not divide into parts of {mini_batch_size}")
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        numbers: Any = range(len(self))
        loader = torch.utils.data.DataLoader(
            numbers, mini_batch_size, generator=generator, **(dataloader_kwargs or {})
        )
        return (self[rows] for _ in range(epochs) for rows in loader)

    @staticmethod
    def concat(parts: Iterable[DataProto]) -> DataProto:
        """Concatenate the rows of parts with the same columns.

        Where entries of ``meta_info`` differ, the first part's win.
        """
        parts = list(parts)
        if not parts:
            return DataProto()
        names = {name for name, _ in parts[0]._columns()}
        for part in parts[1:]:
            others = {name for name, _ in part._columns()}
            if others != names:
                raise ValueError(f"DataProto.concat: columns differ: {sorted(names ^ others)}")
        return DataProto(
            {name: torch.cat([part.batch[name] for part in parts]) for name in parts[0].batch},
            {
                name: np.concatenate([part.non_tensor_batch[name] for part in parts])
                for name in parts[0].non_tensor_batch
            },
            # reversed, so that the first part is written last and wins
            {key: value for part in reversed(parts) for key, value in part.meta_info.items()},
        )

    def to(self, device: torch.device | str) -> DataProto:
        """Move the tensors to another device."""
        return self._map(lambda t: t.to(device), lambda a: a)

    def _columns(self) -> Iterable[tuple[str, Tensor | np.ndarray]]:
        yield from self.batch.items()
        yield from self.non_tensor_batch.items()

    def _map(self, of_tensor: Any, of_array: Any) -> DataProto:
        return DataProto(
            {name: of_tensor(tensor) for name, tensor in self.batch.items()},
            {name: of_array(array) for name, array in self.non_tensor_batch.items()},
            dict(self.meta_info),
        )


def sequence_columns(input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
    """Return the columns [B, L] of token ids, with the positions of real tokens among them."""
    position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}


def padded_on_the_left(
    rows: Sequence[Sequence[int] | Tensor], pad_token_id: int = 0, width: int | None = None
) -> dict[str, Tensor]:
    """Return ``sequence_columns`` of token ids, in ``width`` columns; None: as many as the longest has."""
    lengths_B1 = torch.tensor([[len(ids)] for ids in rows])
    width = int(lengths_B1.max()) if width is None else width
    mask_BL = torch.arange(width) >= width - lengths_B1
    ids_BL = torch.full(mask_BL.shape, pad_token_id)
    ids_BL[mask_BL] = torch.cat([torch.as_tensor(ids, dtype=torch.int64) for ids in rows])
    return sequence_columns(ids_BL, mask_BL.long())
