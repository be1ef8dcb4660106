"""One version of the weights as a safetensors file, written while they arrive, and read by servers.

In memory it has no name in a file system, so nothing is left however the run ends: servers of this machine
open it by the descriptor of this process. Else it is a file in a folder that all servers share. The library
itself writes a file from tensors that are all in memory, which would take the memory of one more model.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_NAME_BYTES = 4
_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip


class SealedWeights:
    """The file of one version; ``write`` every weight, then ``seal``."""

    def __init__(self, version: str, weights: Mapping[str, Tensor], folder: Path | None) -> None:
        """``weights``: names, shapes and dtypes (on the meta device); ``folder`` None: in memory."""
        header: dict[str, Any] = {"__metadata__": {"version": version}}
        end, self._first = 0, dict[str, int]()
        for name, weight in weights.items():
            self._first[name], end = end, end + weight.nbytes
            places = [self._first[name], end]
            header[name] = {
                "dtype": _TYPES[weight.dtype], "shape": list(weight.shape), "data_offsets": places
            }  # fmt: skip
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self.version, self.size = version, 8 + len(text) + end
        self._begin, self._weights, self._in_memory = 8 + len(text), weights, folder is None
        if folder is None:
            memory = os.memfd_create("strop-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self._file, self.path = os.fdopen(memory, "w+b"), f"/proc/{os.getpid()}/fd/{memory}"
        else:
            folder.mkdir(parents=True, exist_ok=True)
            self.path = str(folder / f"{version.replace('/', '-')}.safetensors")
            self._file = open(self.path, "w+b")  # noqa: SIM115 - ``close``
        self._file.write(len(text).to_bytes(8, "little") + text)

    @contextlib.contextmanager
    def _naming_the_file(self) -> Generator[None]:
        """Name the file in an error of writing, such as of a full disk: the system does not."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.path) from error

    def write(self, name: str, weight: Tensor) -> None:
        """Write a weight at its place, in the dtype of the file."""
        flat = weight.detach().to("cpu", self._weights[name].dtype).contiguous().reshape(-1)
        with self._naming_the_file():
            self._file.seek(self._begin + self._first[name])
            self._file.write(memoryview(flat.view(torch.uint8).numpy()))

    def seal(self) -> None:
        """End the writing."""
        with self._naming_the_file():
            self._file.flush()
            if self._in_memory:
                fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK)
            else:
                os.fsync(self._file)

    def close(self) -> None:
        """Delete it; a server that reads it keeps its mapping."""
        self._file.close()
        if not self._in_memory:
            Path(self.path).unlink(missing_ok=True)


def new_name() -> str:
    """Return a name that no other run's versions begin with."""
    return secrets.token_hex(_NAME_BYTES)


def delete_left(folder: Path) -> None:
    """Delete the files that a killed run has left in ``folder``."""
    for left in folder.glob(f"{'[0-9a-f]' * 2 * _NAME_BYTES}-*.safetensors"):
        left.unlink()
