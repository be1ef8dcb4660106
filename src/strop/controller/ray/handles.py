"""Tensors that stay in the object store until they are read.

A worker's batch stays in Ray's object store, and the driver holds ``RemoteTensor``s, which behave like
tensors: selecting, joining and sending rows only records references, and the first other operation fetches
the bytes. So a column that the driver never computes with never passes through it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from strop.torch_private import wrapper


def to_array(tensor: Tensor) -> np.ndarray:
    """Return the bytes of a tensor on the CPU; bfloat16, which numpy lacks, becomes int16."""
    tensor = tensor.detach().cpu().contiguous()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def to_tensor(array: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Return a tensor that shares the memory of ``array``; like every tensor of a batch it is read-only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == torch.bfloat16 else tensor


Columns = dict[str, tuple[np.ndarray, torch.dtype]]
"""One rank's tensors in the store: name -> (array, dtype)."""
Fetch = Callable[[dict[int, Any]], dict[int, Columns]]
"""Function that reads one object of the store per rank, concurrently."""


class RemoteValue:
    """A worker's value that only another worker will read, such as a bucket of weights."""

    def __init__(self, reference: Any) -> None:
        self.reference = reference


class RemoteColumns:
    """The tensors that one rank returned from one call; small ones share an object of the store."""

    def __init__(
        self,
        rank: int,
        reference: Any,
        rows: int,
        fetch: Fetch,
        apart: Mapping[str, Any],
        read: set[str],
    ) -> None:
        """Hold references to ``rows`` rows.

        ``apart``: references of columns outside the object ``reference``. ``read`` collects the names of the
        columns that the driver reads.
        """
        self.rank, self.rows = rank, rows
        self._shared, self._apart, self._read = reference, apart, read
        self._fetch = fetch
        self._fetched: dict[Any, Columns] = {}

    def reference(self, name: str) -> Any:
        """Return the reference of the object that holds a column."""
        return self._apart.get(name, self._shared)

    @staticmethod
    def column(name: str, parts: Sequence[RemoteColumns]) -> Tensor:
        """Return a column's rows on these ranks; objects are fetched once, those of one call concurrently."""
        while missing := [part for part in parts if part.reference(name) not in part._fetched]:
            fetch = missing[0]._fetch
            by_rank = {part.rank: part for part in missing if part._fetch == fetch}
            for rank, columns in fetch({r: part.reference(name) for r, part in by_rank.items()}).items():
                by_rank[rank]._fetched[by_rank[rank].reference(name)] = columns
        for part in parts:
            part._read.add(name)
        found = [to_tensor(*part._fetched[part.reference(name)][name]) for part in parts]
        return found[0] if len(found) == 1 else torch.cat(found)


class Layout:
    """A sequence of rows of several ranks' columns, shared by all columns of a batch."""

    def __init__(self, parts: Sequence[RemoteColumns], index: Tensor | None = None) -> None:
        """Select ``index`` from the concatenated rows of ``parts``; None selects all."""
        self.parts = tuple(parts)
        self.index = index
        self._last: tuple[Any, Layout] | None = None
        self._last_join: tuple[list[Layout], Layout] | None = None

    def __len__(self) -> int:
        return sum(part.rows for part in self.parts) if self.index is None else len(self.index)

    def take(self, rows: slice | Tensor) -> Layout:
        """Return these rows; the last result is cached, as all columns of a batch take the same rows."""
        # by identity for a tensor: comparing indices would cost as much as taking them
        if self._last is not None and (
            self._last[0] is rows or (isinstance(rows, slice) and self._last[0] == rows)
        ):
            return self._last[1]
        taken = Layout(self.parts, (torch.arange(len(self)) if self.index is None else self.index)[rows])
        self._last = (rows, taken)
        return taken

    @staticmethod
    def join(layouts: Sequence[Layout]) -> Layout:
        """Concatenate layouts; the last result is cached for the other columns that share them."""
        first, others = layouts[0], list(layouts[1:])
        if first._last_join is None or first._last_join[0] != others:
            first._last_join = (others, Layout._joined(layouts))
        return first._last_join[1]

    @staticmethod
    def _joined(layouts: Sequence[Layout]) -> Layout:
        parts = list(dict.fromkeys(part for layout in layouts for part in layout.parts))
        if sum(len(layout.parts) for layout in layouts) == len(parts) and all(
            layout.index is None for layout in layouts
        ):
            return Layout(parts)
        starts = torch.tensor([0, *(part.rows for part in parts)]).cumsum(0)
        places = {part: torch.arange(part.rows) + starts[number] for number, part in enumerate(parts)}
        indices = []
        for layout in layouts:
            rows = torch.cat([places[part] for part in layout.parts])
            indices.append(rows if layout.index is None else rows[layout.index])
        return Layout(parts, torch.cat(indices))

    @cached_property
    def pieces(self) -> tuple[list[tuple[RemoteColumns, np.ndarray | None]], np.ndarray | None]:
        """Rows by part (None: all), and the order of the concatenated pieces (None: unchanged)."""
        if self.index is None:
            return [(part, None) for part in self.parts], None
        index, starts = self.index.numpy(), np.cumsum([0, *(part.rows for part in self.parts)])
        # right: of parts without rows, whose starts are equal, the last one owns the row
        owners = np.searchsorted(starts, index, side="right") - 1
        order = np.argsort(owners, kind="stable")
        present, first = np.unique(owners[order], return_index=True)
        rows = np.split((index - starts[owners])[order], first[1:])
        pieces: list[tuple[RemoteColumns, np.ndarray | None]] = [
            (self.parts[owner], own) for owner, own in zip(present, rows, strict=True)
        ]
        is_sorted = bool((owners[1:] >= owners[:-1]).all())
        return pieces, None if is_sorted else np.argsort(order)


class RemoteTensor(Tensor):
    """A column with rows on several ranks: a tensor whose bytes are fetched when needed."""

    column: str
    source: Layout
    _fetched: Tensor | None

    @staticmethod
    def of(column: str, layout: Layout, *, row_shape: Sequence[int], dtype: torch.dtype) -> RemoteTensor:
        """Return the named column, with one row of shape ``row_shape`` per row of the layout."""
        # a tensor without storage: shape and dtype are known before any byte has arrived
        tensor = wrapper(RemoteTensor, (len(layout), *row_shape), dtype)
        tensor.column, tensor.source, tensor._fetched = column, layout, None
        return tensor

    def rows(self, rows: slice | Tensor) -> RemoteTensor:
        """Select rows without fetching."""
        taken = RemoteTensor.of(
            self.column, self.source.take(rows), row_shape=self.shape[1:], dtype=self.dtype
        )
        if self._fetched is not None:
            taken._fetched = self._fetched[rows]
        return taken

    def fetch(self) -> Tensor:
        """Return an ordinary tensor with the same content."""
        if self._fetched is None:
            whole, index = RemoteColumns.column(self.column, self.source.parts), self.source.index
            self._fetched = whole if index is None else whole[index]
        return self._fetched

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs)
        if func is torch.cat and (joined := _join(*args, **kwargs)) is not None:
            return joined
        own = args[0] if args and isinstance(args[0], RemoteTensor) else None
        if own is not None and (rows := _selected_rows(func, own, *args[1:], **kwargs)) is not None:
            return own.rows(rows)
        if _writes(func, args, kwargs):
            raise RuntimeError(
                f"{func.__name__} would write into a worker's batch, which is read-only: use a clone()"
            )
        return func(*_plain(args), **_plain(kwargs))

    @classmethod
    def __torch_dispatch__(  # ty: ignore[incompatible-method-override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*_plain(args), **_plain(kwargs or {}))


_METADATA = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.element_size, Tensor.__len__),
}


def _plain(value: Any) -> Any:
    """Return ``value`` with its remote tensors fetched."""
    if isinstance(value, RemoteTensor):
        return value.fetch()
    if type(value) in (tuple, list):
        return type(value)(_plain(item) for item in value)
    if type(value) is dict:
        return {name: _plain(item) for name, item in value.items()}
    return value


def _selected_rows(func: Any, tensor: RemoteTensor, *args: Any, **kwargs: Any) -> slice | Tensor | None:
    """Return the rows that an operation selects; None if the operation does anything else."""
    if not args:
        return None
    if func is Tensor.__getitem__ and _is_rows(args[0]):
        return args[0]
    if func in _REPEAT_ROWS and isinstance(args[0], int) and (args[1:] or (kwargs.get("dim"),)) == (0,):
        return torch.arange(len(tensor)).repeat_interleave(args[0])
    if func is Tensor.repeat and len(args) == tensor.dim() and set(args[1:]) <= {1}:
        return torch.arange(len(tensor)).repeat(args[0])
    return None


_REPEAT_ROWS = {Tensor.repeat_interleave, torch.repeat_interleave}


def _is_rows(index: Any) -> bool:
    return isinstance(index, slice) or (
        type(index) is Tensor and index.dim() == 1 and index.dtype == torch.long
    )


def _writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True for ``add_``, ``+=``, ``t[rows] = x``, ``out=`` or ``inplace=`` on a remote tensor."""
    if isinstance(kwargs.get("out"), RemoteTensor):
        return True
    name = func.__name__
    in_place = name in _IN_PLACE or kwargs.get("inplace") or (name.endswith("_") and name[-2:] != "__")
    return bool(in_place) and bool(args) and isinstance(args[0], RemoteTensor)


_OPERATORS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift",
)  # fmt: skip
_IN_PLACE = {"__setitem__", *(f"__i{name}__" for name in _OPERATORS)}


def _join(tensors: Any, dim: int = 0) -> RemoteTensor | None:
    """Concatenate rows of one remote column; None if ``tensors`` are anything else."""
    remote = [tensor for tensor in tensors if isinstance(tensor, RemoteTensor)]
    kinds = {(tensor.column, tensor.shape[1:], tensor.dtype) for tensor in remote}
    if dim != 0 or len(remote) < len(tensors) or len(kinds) > 1:
        return None
    first = remote[0]
    layout = Layout.join([tensor.source for tensor in remote])
    return RemoteTensor.of(first.column, layout, row_shape=first.shape[1:], dtype=first.dtype)
