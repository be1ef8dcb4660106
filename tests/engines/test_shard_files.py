"""The index of a sharded state is read as data: the same as torch reads it, and nothing in it runs."""

from __future__ import annotations

import pickle
import random
import subprocess
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from strop.engines.torch import state
from strop.engines.torch.shard_files import DigestingWriter, IndexReader
from strop.errors import CheckpointError


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    module = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(module.parameters())
    state.materialize(optimizer)
    folder = tmp_path_factory.mktemp("state")
    state.save(module, optimizer, folder)
    return folder, module, optimizer


def with_index(saved, tmp_path, content: bytes):
    """A copy of the state with another index."""
    for path in saved[0].iterdir():
        (tmp_path / path.name).write_bytes(content if path.name == ".metadata" else path.read_bytes())
    return tmp_path


def test_the_index_is_read_as_torch_reads_it(saved):
    expected = dcp.FileSystemReader(str(saved[0])).read_metadata()
    found = IndexReader(str(saved[0])).read_metadata()
    assert len(found.state_dict_metadata) == 16
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.storage_data == expected.storage_data


@pytest.mark.parametrize("background", [False, True])
def test_digests_are_left_beside_the_files_that_were_written(saved, tmp_path, background, recwarn):
    saving = state.BackgroundSave()
    saving.begin(partial(state.save, saved[1], saved[2], tmp_path, background=background), tmp_path)
    saving.finish()
    (shard,) = tmp_path.glob("*.distcp")
    digest = (tmp_path / f"{shard.name}.xxh3_128").read_text()
    assert digest == xxhash.xxh3_128_hexdigest(shard.read_bytes())
    assert not recwarn.list  # torch's, of a single process


class Runs:
    def __init__(self, function, *arguments) -> None:
        self.call = function, arguments

    def __reduce__(self):
        return self.call


class Changes:
    """Sets an attribute of a class when it is unpickled: BUILD with a state of slots."""

    def __reduce__(self):
        return getattr, (ChunkStorageMetadata, "__class__"), (None, {"__eq__": 1})


def attacks(marker):
    index = Metadata({"model.0.weight": Runs(subprocess.check_call, ["touch", str(marker)])})
    yield pickle.dumps(Runs(subprocess.check_call, ["touch", str(marker)]))
    yield pickle.dumps(index)
    yield pickle.dumps(Changes())
    # BUILD with (None, {"mark": 1}) on the class itself: plain pickle sets an attribute of the class.
    name = f"{ChunkStorageMetadata.__module__}\n{ChunkStorageMetadata.__name__}\n".encode()
    yield b"c" + name + b"(N}X\x04\x00\x00\x00markK\x01stb."
    yield b"cos\nsystem\n(X\x05\x00\x00\x00falsetR."
    yield b"cstrop.errors\nportable.__globals__\n."


@pytest.mark.parametrize("number", range(6))
def test_nothing_that_an_index_names_is_run_or_changed(saved, tmp_path, number):
    marker = tmp_path / "run"
    (tmp_path / "state").mkdir()
    folder = with_index(saved, tmp_path / "state", list(attacks(marker))[number])
    before = dict(vars(ChunkStorageMetadata))
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        state.load(saved[1], saved[2], folder)
    assert not marker.exists()
    assert dict(vars(ChunkStorageMetadata)) == before


@pytest.mark.parametrize("file", ["../secret", "/etc/passwd", "a/b", "..", ""])
def test_an_index_that_names_a_file_elsewhere_is_refused(saved, tmp_path, file):
    index = dcp.FileSystemReader(str(saved[0])).read_metadata()
    for place in index.storage_data.values():
        place.relative_path = file
    with pytest.raises(CheckpointError, match="file"):
        state.load(saved[1], saved[2], with_index(saved, tmp_path, pickle.dumps(index)))


def test_a_damaged_index_is_an_error_or_an_index(saved, tmp_path):
    content, draw = (saved[0] / ".metadata").read_bytes(), random.Random(1)
    refused = 0
    for _ in range(400):
        damaged = bytearray(content)
        damaged[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        try:
            IndexReader(str(with_index(saved, tmp_path, bytes(damaged)))).read_metadata()
        except pickle.UnpicklingError:
            refused += 1
    assert refused > 200


def test_a_stream_is_closed_before_its_file(tmp_path):
    with DigestingWriter(tmp_path).fs.create_stream(tmp_path / "0.distcp", "wb") as stream:
        stream.write(b"shard")
    assert stream.closed  # else its finalizer flushes a closed file, which Python 3.13 reports
    assert (tmp_path / "0.distcp").read_bytes() == b"shard"
