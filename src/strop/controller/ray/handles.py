"""Handles: tensors that stay where they were computed until somebody reads them.

A worker's batch stays in the object store. The driver holds ``RemoteTensor``s: to the trainer they are
tensors; taking rows of one is only noted down, sending one to a worker sends the note, and the first other
operation fetches the bytes. So a column that the driver never computes with never passes through it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Tensors as numpy arrays, which cross between processes out of band and without a copy.


def to_array(tensor: Tensor) -> np.ndarray:
    """The bytes of a tensor, on the CPU; numpy has no bfloat16, which travels as int16."""
    tensor = tensor.detach().cpu().contiguous()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def to_tensor(array: np.ndarray, dtype: torch.dtype) -> Tensor:
    """The tensor whose bytes these are; it shares them, and like every tensor of a batch it is only read."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == torch.bfloat16 else tensor


Columns = dict[str, tuple[np.ndarray, torch.dtype]]

"""One rank's tensors in the store: name -> (array, dtype)."""

Fetch = Callable[[dict[int, Any]], dict[int, Columns]]

"""Objects of the store by rank, all at once."""


class RemoteValue:
    """Something of a worker that only another worker will read, such as a bucket of weights."""

    def __init__(self, reference: Any) -> None:
        self.reference = reference


class RemoteColumns:
    """The tensors that one rank returned from one call, in objects of the store: small ones share one."""

    def __init__(
        self,
        rank: int,
        reference: Any,
        rows: int,
        fetch: Fetch,
        apart: Mapping[str, Any] | None = None,
        read: set[str] | None = None,
    ) -> None:
        """``apart``: the references of columns in other objects than ``reference``; ``read``: where to note
        the names of columns that are read.
        """
        self.rank, self.rows = rank, rows
        self._shared, self._apart = reference, dict(apart or {})
        self._read = set() if read is None else read
        self._fetch = fetch
        self._fetched: dict[Any, Columns] = {}

    def reference(self, name: str) -> Any:
        """The object that holds a column."""
        return self._apart.get(name, self._shared)

    @staticmethod
    def column(name: str, parts: Sequence[RemoteColumns]) -> Tensor:
        """A column's rows on all these ranks; every object is fetched once, those of one call together."""
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
    """Which rows of which ranks' columns follow one another; shared by the columns of a batch."""

    def __init__(self, parts: Sequence[RemoteColumns], index: Tensor | None = None) -> None:
        """``index``: rows of all parts, as if these lay one after another; None for all of them."""
        self.parts = tuple(parts)
        self.index = index
        self._last: tuple[Any, Layout] | None = None
        self._last_join: tuple[list[Layout], Layout] | None = None

    def __len__(self) -> int:
        return sum(part.rows for part in self.parts) if self.index is None else len(self.index)

    def take(self, rows: slice | Tensor) -> Layout:
        """These rows of it. Columns of one batch ask one after another for the same rows: made once."""
        if self._last is not None and (
            self._last[0] is rows or (isinstance(rows, slice) and self._last[0] == rows)
        ):
            return self._last[1]
        taken = Layout(self.parts, (torch.arange(len(self)) if self.index is None else self.index)[rows])
        self._last = (rows, taken)
        return taken

    @staticmethod
    def join(layouts: Sequence[Layout]) -> Layout:
        """The rows of all, one layout after another. Made once for the columns that share them."""
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
        """Rows by part (None: all), and how the pieces' rows are put in order (None: as they come)."""
        if self.index is None:
            return [(part, None) for part in self.parts], None
        index, starts = self.index.numpy(), np.cumsum([0, *(part.rows for part in self.parts)])
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
    """One column of rows that lie with several ranks: a tensor whose bytes are fetched when needed."""

    column: str
    source: Layout
    _fetched: Tensor | None

    @staticmethod
    def of(column: str, layout: Layout, *, row_shape: Sequence[int], dtype: torch.dtype) -> RemoteTensor:
        """The column of that name, with a row of shape ``row_shape`` for each row of the layout."""
        make: Any = Tensor._make_wrapper_subclass
        tensor = make(RemoteTensor, (len(layout), *row_shape), dtype=dtype)
        tensor.column, tensor.source, tensor._fetched = column, layout, None
        return tensor

    def rows(self, rows: slice | Tensor) -> RemoteTensor:
        """These rows of it; nothing is fetched."""
        taken = RemoteTensor.of(
            self.column, self.source.take(rows), row_shape=self.shape[1:], dtype=self.dtype
        )
        if self._fetched is not None:
            taken._fetched = self._fetched[rows]
        return taken

    def fetch(self) -> Tensor:
        """An ordinary tensor with these rows."""
        if self._fetched is None:
            whole, index = RemoteColumns.column(self.column, self.source.parts), self.source.index
            self._fetched = whole if index is None else whole[index]
        return self._fetched

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ASKS_FOR_NO_BYTES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is torch.cat and (joined := _join(*args, **kwargs)) is not None:
            return joined
        own = args[0] if args and isinstance(args[0], RemoteTensor) else None
        if own is not None and (rows := _rows_asked_for(func, own, *args[1:], **kwargs)) is not None:
            return own.rows(rows)
        if _writes(func, args, kwargs):
            raise RuntimeError(
                f"{func.__name__} would write into a worker's batch, which is only read: work on a clone()"
            )
        return func(*_plain(args), **_plain(kwargs))

    @classmethod
    def __torch_dispatch__(  # ty: ignore[incompatible-method-override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*_plain(args), **_plain(kwargs or {}))


_ASKS_FOR_NO_BYTES = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.element_size, Tensor.__len__),
}


def _plain(value: Any) -> Any:
    """``value`` with the remote tensors in it fetched."""
    if isinstance(value, RemoteTensor):
        return value.fetch()
    if type(value) in (tuple, list):
        return type(value)(_plain(item) for item in value)
    if type(value) is dict:
        return {name: _plain(item) for name, item in value.items()}
    return value


def _rows_asked_for(func: Any, tensor: RemoteTensor, *args: Any, **kwargs: Any) -> slice | Tensor | None:
    """The rows that an operation takes when this is all it does; None for any other operation."""
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
    """Whether this is ``add_``, ``+=``, ``t[rows] = x``, ``out=`` or ``inplace=`` on a remote tensor."""
    if isinstance(kwargs.get("out"), RemoteTensor):
        return True
    name = func.__name__
    in_place = name in _IN_PLACE or kwargs.get("inplace") or (name.endswith("_") and name[-2:] != "__")
    return bool(in_place) and bool(args) and isinstance(args[0], RemoteTensor)


_OPERATORS = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
)

_IN_PLACE = {"__setitem__", *(f"__i{name}__" for name in _OPERATORS)}


def _join(tensors: Any, dim: int = 0) -> RemoteTensor | None:
    """Remote columns one after another as one remote column; None if they are anything else."""
    remote = [tensor for tensor in tensors if isinstance(tensor, RemoteTensor)]
    kinds = {(tensor.column, tensor.shape[1:], tensor.dtype) for tensor in remote}
    if dim != 0 or len(remote) < len(tensors) or len(kinds) > 1:
        return None
    first = remote[0]
    layout = Layout.join([tensor.source for tensor in remote])
    return RemoteTensor.of(first.column, layout, row_shape=first.shape[1:], dtype=first.dtype)
