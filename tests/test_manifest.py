"""What a manifest may name, and what is found when a file is not what was written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import fsspec
import pytest
import xxhash

from strop import manifest
from strop.data.fetch import local_path
from strop.errors import CheckpointError

from messages import mentions, naming


@pytest.fixture
def memory_model() -> str:
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pipe({"/bucket/model/config.json": b"{}", "/bucket/model/model.safetensors": b"weights"})
    return "memory://bucket/model"


OUTSIDE = [
    *("../x", "a/../../x", "a/..", "/tmp/x", "//x", "a//x", ".", "..", "", "a/", "./x"),
    *("..\\x", "C:\\x", "a\nb", "a\0b", "\u001b[2J", "\ud800"),
]


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "global_step_1" / "actor" / "huggingface").mkdir(parents=True)
    (tmp_path / "global_step_1" / "trainer.pt").write_bytes(b"state")
    (tmp_path / "global_step_1" / "actor" / "huggingface" / "config.json").write_bytes(b"{}" * 200_000)
    manifest.write(tmp_path / "global_step_1", manifest.describe(tmp_path / "global_step_1"))
    return tmp_path / "global_step_1"


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_path_that_is_not_relative_and_inside_is_refused(name):
    text = json.dumps({"trainer.pt": {"size": 1, "xxh3_128": "0"}, name: {"size": 1, "xxh3_128": "0"}})
    with pytest.raises(CheckpointError, match=naming("s3://there", repr(name))):
        manifest.parse(text, "s3://there")


def test_sizes_and_digests_are_those_of_the_files(folder):
    content = json.loads((folder / "manifest.json").read_text())
    expected = {
        name: {
            "size": (folder / name).stat().st_size,
            "xxh3_128": xxhash.xxh3_128_hexdigest((folder / name).read_bytes()),
        }
        for name in ("trainer.pt", "actor/huggingface/config.json")
    }
    assert content == expected


def test_a_digest_that_a_writer_left_is_taken_and_removed(folder):
    manifest.leave_digest(folder / "trainer.pt", "12" * 16)
    found = manifest.describe(folder)
    assert found["trainer.pt"] == (5, "12" * 16)
    assert sorted(found) == ["actor/huggingface/config.json", "trainer.pt"]
    assert sorted(path.name for path in folder.iterdir()) == ["actor", "manifest.json", "trainer.pt"]


@pytest.mark.parametrize("part", [".", "actor", "actor/huggingface"])
def test_a_part_of_a_checkpoint_finds_its_digests(folder, part):
    found = manifest.covering((folder / part).resolve())
    assert "config.json" in {Path(name).name for name in found}
    manifest.require_unchanged("here", folder / part, found)
    path = folder / "actor" / "huggingface" / "config.json"
    content = bytearray(path.read_bytes())
    content[300_000] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=naming("here", "config.json")):
        manifest.require_unchanged("here", folder / part, found)


@pytest.mark.parametrize("content", [[], {"a": 1}, {"a": "b"}, {"../a": {"version": 3}}, None])
def test_a_manifest_of_another_program_is_ignored(tmp_path, content):
    """Models on the hub may have a file of this name."""
    (tmp_path / "manifest.json").write_text("{" if content is None else json.dumps(content))
    assert manifest.covering(tmp_path) == {}


@pytest.mark.parametrize(
    "damage", [lambda text: "", lambda text: text[:-1], lambda text: text.replace("size", "sIze", 1)]
)
def test_a_damaged_manifest_is_not_taken_for_one_of_another_program(folder, damage):
    path = folder / "manifest.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(CheckpointError, match=naming(str(folder), "manifest.json")):
        manifest.covering(folder / "actor")


def test_sizes_alone_are_compared_where_an_earlier_version_wrote_no_digests(folder):
    (folder / "manifest.json").write_text('{"trainer.pt": 5}')
    found = manifest.parse((folder / "manifest.json").read_bytes(), "here")
    (folder / "trainer.pt").write_bytes(b"STATE")
    manifest.require_unchanged("here", folder, found)
    (folder / "trainer.pt").write_bytes(b"more state")
    with pytest.raises(CheckpointError, match=naming("trainer.pt", "10 bytes")):
        manifest.require_unchanged("here", folder, found)


def test_the_remedy_for_a_damaged_model_is_that_of_its_origin(memory_model, tmp_path):
    model = local_path(memory_model, tmp_path / "cache")
    assert mentions(manifest.remedy_of(model), "delete", str(model.parent), "download")
    (model / "model.safetensors").write_bytes(b"wEights")
    with pytest.raises(CheckpointError, match=naming(str(model), "model.safetensors")):
        manifest.require_unchanged(str(model), model, manifest.covering(model))
    shutil.rmtree(model.parent)
    assert local_path(memory_model, tmp_path / "cache") == model
    own = tmp_path / "downloads" / "model"  # a user's folder of this name
    own.mkdir(parents=True)
    manifest.write(own, manifest.describe(own))
    assert mentions(manifest.remedy_of(own), "on purpose", "manifest.json")
