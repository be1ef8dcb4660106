from __future__ import annotations

from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from strop.data.fetch import local_path
from strop.errors import DataError
from strop.files import atomic_path

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
