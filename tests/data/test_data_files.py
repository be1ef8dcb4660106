from __future__ import annotations

import io
import json
import logging
import tarfile
import zipfile
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from strop.data.fetch import local_path
from strop.data.sources import read_table
from strop.errors import CheckpointError, DataError
from strop.files import atomic_folder, atomic_path
from strop.manifest import covering, require_unchanged

from messages import naming


@pytest.fixture
def downloads(monkeypatch):
    """The remote paths of all downloads from the memory file system, in order."""
    seen = []
    original = MemoryFileSystem.get_file

    def counted(self, rpath, lpath, **kwargs):
        seen.append(rpath)
        return original(self, rpath, lpath, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "get_file", counted)
    return seen


def below(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if not path.name.endswith(".lock"))


def test_a_local_path_is_used_where_it_is(tmp_path):
    assert local_path("~/x.parquet") == Path.home() / "x.parquet"
    assert local_path("some-org/some-model") == Path("some-org/some-model")
    (tmp_path / "a.txt").write_text("here")
    assert local_path(f"file://{tmp_path}/a.txt", tmp_path / "cache") == tmp_path / "a.txt"
    assert not (tmp_path / "cache").exists()


def test_a_url_is_downloaded_once_and_again_when_it_changed(memory_fs, tmp_path, downloads):
    memory_fs.pipe("/bucket/train.parquet", b"one")
    first = local_path("memory://bucket/train.parquet", tmp_path)
    assert first.name == "train.parquet"
    assert first.read_bytes() == b"one"
    assert local_path("memory://bucket/train.parquet", tmp_path) == first
    assert downloads == ["/bucket/train.parquet"]

    memory_fs.pipe("/bucket/train.parquet", b"two")
    second = local_path("memory://bucket/train.parquet", tmp_path)
    assert second.read_bytes() == b"two"
    assert first.read_bytes() == b"one"
    assert len(downloads) == 2


def test_a_folder_comes_with_all_its_files(memory_fs, tmp_path, downloads):
    memory_fs.pipe("/models/tiny/config.json", b"{}")
    memory_fs.pipe("/models/tiny/shards/a.safetensors", b"weights")
    folder = local_path("memory://models/tiny/", tmp_path)
    assert folder.name == "tiny"
    assert (folder / "config.json").read_bytes() == b"{}"
    assert (folder / "shards" / "a.safetensors").read_bytes() == b"weights"
    assert local_path("memory://models/tiny/", tmp_path) == folder
    assert len(downloads) == 2


def test_a_download_that_fails_midway_leaves_nothing_and_can_be_repeated(memory_fs, tmp_path, monkeypatch):
    memory_fs.pipe("/models/m/a.bin", b"first")
    memory_fs.pipe("/models/m/b.bin", b"second")
    original = MemoryFileSystem.get_file

    def breaks_at_the_second(self, rpath, lpath, **kwargs):
        if rpath.endswith("b.bin"):
            Path(lpath).write_bytes(b"sec")
            raise ConnectionResetError("the line went dead")
        return original(self, rpath, lpath, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "get_file", breaks_at_the_second)
        with pytest.raises(DataError, match=naming("memory://models/m", "the line went dead")):
            local_path("memory://models/m", tmp_path)
    assert below(tmp_path) == ["downloads"]
    assert below(local_path("memory://models/m", tmp_path)) == ["a.bin", "b.bin"]


@pytest.mark.parametrize("kind", ["zip", "tar"])
@pytest.mark.parametrize("read", [local_path, read_table])
def test_an_archive_writes_nothing_outside_its_folder(tmp_path, kind, read):
    """Joined to the folder of the download, the name is that of a file of the user."""
    victim = tmp_path / "cache" / "victim.txt"
    victim.parent.mkdir()
    victim.write_text("mine")
    archive = tmp_path / f"a.{kind}"
    names = ["train.jsonl", "../../../victim.txt"]
    if kind == "zip":
        with zipfile.ZipFile(archive, "w") as file:
            for name in names:
                file.writestr(name, "theirs")
    else:
        with tarfile.open(archive, "w") as file:
            for name in names:
                entry = tarfile.TarInfo(name)
                entry.size = 6
                file.addfile(entry, io.BytesIO(b"theirs"))
    with pytest.raises(DataError, match=naming(str(archive), "'root/../../../victim.txt'")):
        read(f"{kind}://::file://{archive}", cache_dir=tmp_path / "cache")
    assert victim.read_text() == "mine"
    assert not [path for path in below(tmp_path / "cache") if path.endswith(".jsonl")]


def test_a_bucket_writes_nothing_outside_its_folder(memory_fs, tmp_path):
    memory_fs.pipe("/bucket/data/train.jsonl", b"{}")
    # object stores take any key; pipe() would resolve it
    memory_fs.store["/bucket/data/../../../victim"] = memory_fs.store["/bucket/data/train.jsonl"]
    (tmp_path / "victim").write_text("mine")
    with pytest.raises(DataError, match=naming("memory://bucket/data", "'data/../../../victim'")):
        local_path("memory://bucket/data", tmp_path)
    assert (tmp_path / "victim").read_text() == "mine"


def test_the_name_in_a_url_is_checked_too(memory_fs, tmp_path, monkeypatch):
    memory_fs.pipe("/bucket/a", b"theirs")
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url: (memory_fs, "bucket/.."))
    monkeypatch.setattr(memory_fs, "info", lambda path: {"name": "/bucket/a", "type": "file", "size": 6})
    with pytest.raises(DataError, match=naming("'..'")):
        local_path("other://bucket/..", tmp_path)
    assert below(tmp_path) == ["downloads"]


def test_a_saved_data_set_reads_nothing_outside_its_folder(tmp_path):
    folder = tmp_path / "saved"
    folder.mkdir()
    with pa.ipc.new_stream(str(tmp_path / "secret.arrow"), pa.schema({"a": pa.int64()})) as stream:
        stream.write_table(pa.table({"a": [1]}))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../secret.arrow"}]}))
    with pytest.raises(DataError, match=naming("state.json", "'../secret.arrow'")):
        read_table(folder)


@pytest.mark.parametrize("damage", ["flipped", "longer", "absent"])
def test_a_damaged_download_is_replaced(memory_fs, tmp_path, caplog, downloads, damage):
    memory_fs.pipe("/data/set/train.csv", b"prompt,answer\nq,1\n")
    copy = local_path("memory://data/set", tmp_path) / "train.csv"
    whole = copy.read_bytes()
    if damage == "absent":
        copy.unlink()
    else:
        copy.write_bytes({"flipped": whole.replace(b"1", b"0"), "longer": whole + b"q,2\n"}[damage])
    downloads.clear()
    with caplog.at_level(logging.WARNING):
        assert (local_path("memory://data/set", tmp_path) / "train.csv").read_bytes() == whole
    assert downloads == ["/data/set/train.csv"]
    assert "set/train.csv" in caplog.text
    assert local_path("memory://data/set", tmp_path) == copy.parent
    assert len(downloads) == 1


def test_weights_are_compared_by_size_and_their_digests_are_there_for_those_who_load_them(
    memory_fs, tmp_path, downloads
):
    memory_fs.pipe("/models/m/model.safetensors", b"weights")
    memory_fs.pipe("/models/m/config.json", b"{}")
    folder = local_path("memory://models/m", tmp_path)
    (folder / "model.safetensors").write_bytes(b"Weights")
    assert local_path("memory://models/m", tmp_path) == folder
    with pytest.raises(CheckpointError, match=naming("model.safetensors")):
        require_unchanged(str(folder), folder, covering(folder))
    (folder / "model.safetensors").write_bytes(b"short")
    local_path("memory://models/m", tmp_path)
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_a_data_file_may_be_called_as_the_manifest_is(memory_fs, tmp_path):
    memory_fs.pipe("/bucket/manifest.json", b'[{"a": 1}]')
    for _ in range(2):
        assert local_path("memory://bucket/manifest.json", tmp_path).read_bytes() == b'[{"a": 1}]'


def test_what_cannot_be_found_is_named(memory_fs, tmp_path):
    memory_fs.mkdir("/empty")
    for url, *parts in (
        ("memory://nowhere/train.parquet",),
        ("memory://empty",),
        (f"file://{tmp_path}/absent", "no such file or folder"),
        ("nosuch://a/b", "Protocol not known"),
    ):
        with pytest.raises(DataError, match=naming(url.removeprefix("file://"), *parts)):
            local_path(url, tmp_path)


def test_a_back_end_that_cannot_start_is_one_short_error(tmp_path, monkeypatch):
    # What pyarrow says of hdfs:// on a machine without Java: a hundred lines.
    def no_java(url):
        raise OSError("Unable to load libjvm\n" + "dlopen(...) failed\n" * 100)

    monkeypatch.setattr(fsspec.core, "url_to_fs", no_java)
    with pytest.raises(DataError) as caught:
        local_path("hdfs://namenode:9000/data/train.parquet", tmp_path)
    assert "Unable to load libjvm" in str(caught.value)
    assert "dlopen" not in str(caught.value)


def write_half(target: Path) -> None:
    with atomic_path(target) as temporary:
        temporary.write_text("ne")
        raise OSError("disk full")


def test_an_atomic_write_replaces_the_whole_file_or_leaves_it(tmp_path):
    target = tmp_path / "new" / "file.txt"
    with atomic_path(target) as temporary:
        temporary.write_text("old")
        assert not target.exists()
    with pytest.raises(OSError, match=naming("disk full")):
        write_half(target)
    assert target.read_text() == "old"
    assert below(tmp_path) == ["file.txt", "new"]


def fill_half(target: Path) -> None:
    with atomic_folder(target) as building:
        (building / "a").touch()
        raise KeyboardInterrupt


def test_an_atomic_folder_is_whole_or_absent(tmp_path):
    target = tmp_path / "new" / "folder"
    with pytest.raises(KeyboardInterrupt):
        fill_half(target)
    assert below(tmp_path) == ["new"]
    (tmp_path / "new" / "folder.partial" / "left").mkdir(parents=True)  # by a killed process
    with atomic_folder(target) as building:
        (building / "b").touch()
        assert not target.exists()
    assert below(tmp_path) == ["b", "folder", "new"]


def test_a_file_of_an_archive_is_named_as_fsspec_chains_urls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile("rows.zip", "w") as archive:
        archive.writestr("a.jsonl", '{"prompt": "1+1="}\n')
    assert len(read_table("zip://a.jsonl::rows.zip", cache_dir=tmp_path / "cache")) == 1
