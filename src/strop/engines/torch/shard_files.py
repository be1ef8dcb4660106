"""The files of ``torch.distributed.checkpoint``: written with digests, read without running code in them.

The index of a state, ``.metadata``, is a pickle, and unpickling a file from elsewhere runs what it names.
``IndexReader`` reads it as data: every object becomes a ``_Record`` of a class's name, arguments and state,
no name is looked up, and torch's own objects are built from what such records hold. The tensors themselves
are read by ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from strop.manifest import leave_digest, new_digest
from strop.torch_private import storage_info

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class DigestingWriter(dcp.FileSystemWriter):
    """Leave the digest of every file next to it, taken from the bytes as they are written."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.fs = _DigestingFiles()


class _DigestingFiles(FileSystem):
    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any]:
        # Closed before the file: Python 3.13 reports a stream whose finalizer cannot flush.
        with super().create_stream(path, mode) as stream, _Digested(stream) as digested:
            yield digested
        if mode == "wb" and Path(path).suffix == ".distcp":  # the index is renamed, and small
            leave_digest(Path(path), digested.digest.hexdigest())


class _Digested(io.IOBase):
    """Stream that only appends."""

    def __init__(self, stream: Any) -> None:
        self.digest = new_digest()
        self._stream = stream

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return self._stream.write(data)

    def tell(self) -> int:
        return self._stream.tell()

    def fileno(self) -> int:
        return self._stream.fileno()

    def flush(self) -> None:
        self._stream.flush()


class IndexReader(dcp.FileSystemReader):
    """Read the index as data; see the module."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index; raise ``UnpicklingError`` if it is not one of tensors in this folder."""
        content = Path(self.path, ".metadata").read_bytes()
        try:
            return _index(_Records(io.BytesIO(content)).load(), StorageMeta(load_id=self.load_id))
        except Exception as error:  # a damaged or forged pickle raises nearly every type
            raise pickle.UnpicklingError(f".metadata is not the index of a checkpoint: {error}") from error


class _Record:
    """A pickled object as data."""

    def __new__(cls, *arguments: Any) -> _Record:
        record = super().__new__(cls)
        record.arguments, record.state = arguments, None
        return record

    arguments: tuple[Any, ...]
    state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state


# Not torch's weights_only unpickler: it does not read this protocol, and its allowlist of classes would let a
# pickle set their attributes.
class _Records(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[_Record]:
        """Return a new class for a name that is not looked up."""
        return type(f"{module}.{name}", (_Record,), {})


def _index(found: Any, storage: StorageMeta) -> Metadata:
    """Build torch's index from records of it."""
    index = _state(found, Metadata)
    tensors: dict[str, STORAGE_TYPES] = {
        _of(str, name): _tensor(_state(entry, TensorStorageMetadata))
        for name, entry in index["state_dict_metadata"].items()
    }
    places, kind = {}, storage_info()
    for key, place in index["storage_data"].items():
        key, place = _state(key, MetadataIndex), _state(place, kind)
        file = _of(str, place["relative_path"])
        # a path could lead out of the folder; descriptors name code that transforms what is read
        if file in ("", ".", "..") or "/" in file or place.get("transform_descriptors"):
            raise ValueError(f"it names the file {file!r}; expected plain files of this folder")
        where = kind(file, _of(int, place["offset"]), _of(int, place["length"]))
        places[MetadataIndex(_of(str, key["fqn"]), _size(key["offset"]))] = where
    return Metadata(tensors, storage_data=places, storage_meta=storage)


def _tensor(state: dict[str, Any]) -> TensorStorageMetadata:
    dtype = _state(state["properties"], TensorProperties)[0]
    chunks = [_state(chunk, ChunkStorageMetadata) for chunk in state["chunks"]]
    return TensorStorageMetadata(
        TensorProperties(_DTYPES[dtype.__name__]),
        _size(state["size"]),
        [ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks],
    )


def _size(record: Any) -> torch.Size:
    _require(record, "torch.Size")
    return torch.Size(_of(int, number) for number in record.arguments[0])


def _state(record: Any, kind: type) -> Any:
    _require(record, f"{kind.__module__}.{kind.__qualname__}")
    return record.state


def _require(record: Any, name: str) -> None:
    if type(record).__name__ != name:
        raise TypeError(f"found {type(record).__name__}, expected {name}")


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"found {type(value).__name__}, expected {kind.__name__}")
    return value
