"""The checkpoint that a restart begins from; whole runs that restart: tests/e2e."""

from __future__ import annotations

import pytest

from strop.config.load import load_config
from strop.errors import WorkerError
from strop.trainer import commands


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that trains with one deed per attempt and returns the resume modes."""

    def train(*deeds, resume_mode="auto"):
        modes = []

        def train_once(config):
            modes.append(config.trainer.resume_mode)
            if deed := deeds[len(modes) - 1]:
                deed(tmp_path / "latest_checkpointed_iteration.txt")

        monkeypatch.setattr(commands, "train_once", train_once)
        options = [
            f"trainer.default_local_dir={tmp_path}",
            "trainer.max_restarts=1",
            f"trainer.resume_mode={resume_mode}",
        ]
        commands.with_restarts(load_config(options), commands.train_once)
        return modes

    return train


def dies(latest):
    raise WorkerError("gone")


def saved(latest, step):
    (latest.parent / f"global_step_{step}").mkdir()
    (latest.parent / f"global_step_{step}" / "manifest.json").write_text("{}")


def dies_after_saving(latest):
    saved(latest, 3)
    latest.write_text("3\n")
    raise WorkerError("gone")


def dies_after_going_back(latest):
    latest.write_text("3\n")
    raise WorkerError("gone")


def dies_after_archiving(latest):
    latest.unlink()
    raise WorkerError("gone")


def test_before_the_first_save_it_begins_as_the_run_did(run, tmp_path):
    assert run(dies, None, resume_mode="disable") == ["disable", "disable"]
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("9\n")
    assert run(dies, None, resume_mode="disable") == ["disable", "disable"]


def test_a_named_checkpoint_stays_the_beginning_when_the_folder_was_only_archived(run, tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("9\n")
    named = "/other/run/global_step_100"
    assert run(dies_after_archiving, None, resume_mode=named) == [named, named]


def test_after_a_save_it_goes_on_from_there(run):
    assert run(dies_after_saving, None, resume_mode="disable") == ["disable", "auto"]


def test_a_named_checkpoint_of_the_folder_stays_the_beginning_until_something_is_saved(run, tmp_path):
    """It is made the latest at once; auto would refuse it with other data, for which it was named."""
    latest = tmp_path / "latest_checkpointed_iteration.txt"
    for step in (3, 5):
        saved(latest, step)
    latest.write_text("5\n")
    named = str(tmp_path / "global_step_3")
    assert run(dies_after_going_back, None, resume_mode=named) == [named, named]
