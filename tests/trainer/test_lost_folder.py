"""A run folder that is removed, moved or replaced while its run trains."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from strop.cli.main import main

import runs
import supervised_runs
from messages import mentions


class Harm:
    """A tracker that harms the run folder when the first iteration is logged."""

    how = ""

    def __init__(self, run):
        self.folder = run.run_dir

    def log(self, step, metrics):
        if step == 1:
            getattr(self, Harm.how.replace(" ", "_"))()

    def close(self):
        pass

    def removed(self):
        shutil.rmtree(self.folder)

    def moved(self):
        self.folder.rename(self.folder.with_name("moved"))

    def lock_removed(self):
        (self.folder / ".lock").unlink()

    def lock_replaced(self):
        (self.folder / ".lock").unlink()
        (self.folder / ".lock").touch()

    def made_again(self):
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        (self.folder / ".lock").touch()

    def a_file(self):
        shutil.rmtree(self.folder)
        self.folder.touch()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    return runs.make_inputs(folder / "train"), supervised_runs.make_inputs(folder / "supervised")


def content(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []


ASYNC = (
    "trainer.async_steps=1",
    "actor_rollout_ref.hybrid_engine=False",
    "trainer.resource_pools={learner: [1], rollout: [1]}",
    "trainer.placement={Rollout: rollout}",
)


def slow(*values: Any) -> Any:
    """A neighbour of the other cases."""
    return pytest.param(*values, marks=pytest.mark.slow)


CASES = [
    ("train", "removed", ()),
    ("train", "made again", ()),
    ("train", "lock replaced", (*ASYNC, "trainer.async_save=True")),
    ("dpo", "removed", ()),
    ("sft", "removed", ("trainer.async_save=True",)),
    *(slow("train", how, ()) for how in ("moved", "lock removed", "a file")),
    slow("train", "removed", (*ASYNC, "trainer.save_freq=-1")),
    slow("train", "removed", ("trainer.worker_group=ray",)),
    *(slow(command, "removed", ()) for command in ("sft", "train-rm")),
]


@pytest.mark.fast("train-removed-extra0", "dpo-removed-extra3")
@pytest.mark.parametrize(("command", "how", "extra"), CASES)
def test_the_run_stops_and_writes_nothing_more(inputs, tmp_path, monkeypatch, capsys, command, how, extra):
    helper, folder = (runs, inputs[0]) if command == "train" else (supervised_runs, inputs[1])
    run = tmp_path / "run"
    monkeypatch.setattr(Harm, "how", how)
    after, act = [], getattr(Harm, how.replace(" ", "_"))

    def harm(self):
        act(self)
        after.append((content(run), content(tmp_path)))

    monkeypatch.setattr(Harm, how.replace(" ", "_"), harm)
    options = helper.overrides(
        folder, run, "trainer.save_freq=1", f"trainer.logger=[{__name__}:Harm]", *extra
    )
    options += ["trainer.total_training_steps=3", "trainer.test_freq=-1"]
    status = main([command, *options])
    assert status == 2
    error = capsys.readouterr().err
    assert mentions(error, f"trainer.default_local_dir={run}", ".lock", "iteration")
    assert "Traceback" not in error
    [(in_run, around)] = after
    assert content(tmp_path) == around
    if how == "removed":
        assert not run.exists()
    else:
        assert content(run) in (in_run, [*in_run, "global_step_1"], in_run)
        assert "global_step_2" not in content(run)
