"""Failures of files at the end of a command."""

from __future__ import annotations

import pytest
from small_disk import no_room

from strop.cli.run import run_command
from strop.errors import ConfigError
from strop.files import atomic_path


def status_and_line(action, capsys) -> tuple[int, str]:
    status = run_command(action, debug=False)
    (line,) = capsys.readouterr().err.splitlines()
    return status, line


@pytest.mark.parametrize(
    ("action", "parts"),
    [
        (lambda folder: (folder / "file").mkdir(), ("FileExistsError", "/file'")),
        (lambda folder: (folder / "file" / "run").mkdir(), ("NotADirectoryError", "/file/run'")),
        (lambda folder: (folder / "file" / "x").write_text(""), ("NotADirectoryError", "/file/x'")),
        (lambda folder: folder.read_text(), ("IsADirectoryError",)),
        (lambda folder: (folder / "no" / "x").write_text(""), ("FileNotFoundError", "/no/x'")),
        (no_room, ("OSError", "No space left on device")),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(tmp_path, capsys, action, parts):
    (tmp_path / "file").write_text("")
    status, line = status_and_line(lambda: action(tmp_path), capsys)
    assert status == 2
    for part in parts:
        assert part in line


def test_a_full_disk_names_the_file_that_was_to_be_written(tmp_path, capsys):
    def write() -> int:
        with atomic_path(tmp_path / "table.parquet") as temporary:
            temporary.symlink_to("/dev/full")  # the system's own refusal, which names no file
            temporary.write_text("rows")
        return 0

    status, line = status_and_line(write, capsys)
    assert status == 2
    assert line.startswith("OSError: ")
    assert f"No space left on device: '{tmp_path / 'table.parquet'}'" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [ConfigError("a", "b"), OSError(5, "I/O", "file"), MemoryError("all")])
def test_what_is_saved_is_the_last_line(capsys, error):
    def stopped() -> int:
        error.add_note("stopped at step 2, saved")
        raise error

    assert run_command(stopped, debug=False) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "stopped at step 2, saved"
