"""Writers on a disk that is full: a real one where mounting is permitted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from small_disk import small_disk

from strop.cli.main import main
from strop.errors import write_failure

import runs
import supervised_runs
from messages import mentions


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    return runs.make_inputs(folder / "train"), supervised_runs.make_inputs(folder / "supervised")


def fill(folder: Path, *, but: int) -> None:
    """Leave ``but`` bytes of room."""
    left = os.statvfs(folder)
    with open(folder / "ballast", "wb") as file:
        file.write(bytes(left.f_bavail * left.f_frsize - but))


@pytest.mark.parametrize(
    ("command", "room", "extra"),
    [
        ("sft", 96 << 10, ("trainer.save_freq=1",)),
        # the first write that fails: the tokenizer's, a copy's, one of torch's
        ("sft", 48 << 10, ("trainer.save_freq=1", "trainer.async_save=True")),
        ("sft", 160 << 10, ("trainer.save_freq=1", "trainer.async_save=True")),
        ("sft", 184 << 10, ("trainer.save_freq=1", "trainer.async_save=True")),
        ("sft", 96 << 10, ("trainer.save_freq=-1",)),
        ("train", 40 << 10, ("trainer.save_freq=-1",)),
        ("train", 16 << 10, ("trainer.save_freq=-1",)),
        ("train", 0, ()),
    ],
)
def test_a_run_says_that_the_disk_is_full(inputs, tmp_path, capsys, command, room, extra):
    helper, folder = (runs, inputs[0]) if command == "train" else (supervised_runs, inputs[1])
    with small_disk(tmp_path / "disk", "4m") as disk, runs.undrawn():
        fill(disk, but=room)
        status = main([command, *helper.overrides(folder, disk / "run", *extra)])
        error = capsys.readouterr().err
    assert status == 2, error
    assert mentions(error, "the disk is full (0 MB free on", str(disk))
    assert "Traceback" not in error


def test_what_is_prepared_says_that_the_disk_is_full(tmp_path, capsys):
    with small_disk(tmp_path / "disk", "1m") as disk:
        fill(disk, but=4096)
        assert main(["prepare", "arithmetic", "--out", str(disk / "sums")]) == 2
        error = capsys.readouterr().err
    assert mentions(error, "the disk is full (0 MB free on", str(disk))
    assert "Traceback" not in error


def test_a_path_that_cannot_be_looked_at_keeps_its_error():
    """As one in another user's folder does: pathlib raises for both."""
    error = OSError("Permission denied")
    assert write_failure(error, f"cannot write the model to /tmp/{'a' * 300}") == "Permission denied"


def test_an_evaluation_says_what_it_found_where_the_disk_is_full(inputs, tmp_path, capsys):
    model, data = (str(inputs[0] / name) for name in ("model", "val.parquet"))
    with small_disk(tmp_path / "disk", "1m") as disk:
        fill(disk, but=16 << 10)
        lengths = ["data.max_prompt_length=8", "data.max_response_length=4"]
        assert main(["eval", model, "--data", data, "--out", str(disk / "eval"), *lengths]) == 2
        error = capsys.readouterr().err
    assert mentions(error, "the disk is full (0 MB free on", "val/test_score/strop/arithmetic=")
    assert "Traceback" not in error
