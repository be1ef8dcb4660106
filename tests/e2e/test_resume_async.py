"""Saving in the background: the same numbers, kill -9 in every stage of it, Ctrl-C, and remote copies."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter

from strop import RayPPOTrainer
from strop.checkpoint.folder import verify

import forked
from killing import copy_until
from runs import hashes, make_inputs, metrics, overrides, saved_state, train

SETTINGS = (
    "trainer.total_training_steps=6",
    "trainer.save_freq=1",
    "trainer.async_save=true",
)
KEEP_TWO = "trainer.max_ckpt_to_keep=2"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def synchronous(inputs):
    """The run that all others must equal."""
    run = inputs / "synchronous"
    return run, hashes(train(overrides(inputs, run, *SETTINGS, "trainer.async_save=false")))


def before(owner: Any, name: str, when: Callable[..., bool], action: Callable[[], None]) -> None:
    """Call ``action`` before the method ``name`` of ``owner`` when its arguments fulfil ``when``."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if when(*args):
            action()
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def writes_critic_of_4(writer: FileSystemWriter, *_: Any) -> bool:
    return Path(writer.path).parts[-2:] == ("global_step_4.tmp", "critic")


def starts_5(trainer: RayPPOTrainer, *_: Any) -> bool:
    return trainer.global_step + 1 == 5


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def train_until(stage: str, options: list[str]) -> None:
    """Train and end in ``stage`` of the background save of iteration 4; the other stages are crash points."""
    die = partial(send, signal.SIGKILL)
    if stage == "write":
        before(FileSystemWriter, "write_data", writes_critic_of_4, die)
    elif stage == "metadata":
        before(FileSystemWriter, "finish", writes_critic_of_4, die)
    elif stage == "training":
        before(FileSystemWriter, "write_data", writes_critic_of_4, partial(time.sleep, 10_000))
        before(RayPPOTrainer, "step", starts_5, die)
    elif stage == "ctrl-c":
        before(FileSystemWriter, "write_data", writes_critic_of_4, partial(time.sleep, 1))
        before(RayPPOTrainer, "step", starts_5, partial(send, signal.SIGINT))
    train(options)


def disturbed(stage: str, options: list[str]) -> int:
    """Exit status of a run that ends in ``stage``."""
    done = forked.run(train_until, stage, options, env={"STROP_CRASH_AT": f"{stage}:4"})
    assert done.returncode in (-signal.SIGKILL, -signal.SIGINT), done.stderr[-2000:]
    return done.returncode


def latest(run: Path) -> str:
    return (run / "latest_checkpointed_iteration.txt").read_text()


def test_checkpoints_written_in_the_background_are_the_synchronous_ones(inputs, synchronous, tmp_path):
    other, expected = synchronous
    assert hashes(train(overrides(inputs, tmp_path, *SETTINGS, KEEP_TWO))) == expected
    assert metrics(tmp_path) == metrics(other)
    kept = sorted(path.name for path in tmp_path.glob("global_step_*"))
    assert kept == ["global_step_5", "global_step_6"]
    for name in kept:
        verify(tmp_path / name)
        for role in ("actor", "critic"):
            found, wanted = saved_state(tmp_path / name / role), saved_state(other / name / role)
            assert found.keys() == wanted.keys()
            assert any(key.startswith("optimizer.") for key in found)
            assert all(torch.equal(found[key], wanted[key]) for key in found)
        drivers = [torch.load(run / name / "trainer.pt", weights_only=True) for run in (tmp_path, other)]
        for driver in drivers:
            del driver["seconds"]
        assert str(drivers[0]) == str(drivers[1])


SLOW = pytest.mark.slow  # neighbours of the others


@pytest.mark.parametrize(
    "stage",
    [
        "write",
        pytest.param("metadata", marks=SLOW),
        "training",
        "seal",
        pytest.param("rename", marks=SLOW),
        "latest",
    ],
)
def test_a_run_killed_while_it_saves_in_the_background_continues_to_the_same_numbers(
    inputs, synchronous, tmp_path, stage
):
    other, expected = synchronous
    copy_until(other, 3, tmp_path)
    options = overrides(inputs, tmp_path, *SETTINGS, KEEP_TWO)
    assert disturbed(stage, options) == -signal.SIGKILL
    assert latest(tmp_path) == "3\n"
    verify(tmp_path / "global_step_3")
    assert hashes(train(options)) == expected
    assert metrics(tmp_path) == metrics(other)
    kept = sorted(path.name for path in tmp_path.glob("global_step_*"))
    assert kept == ["global_step_5", "global_step_6"]


def test_ctrl_c_lets_the_save_in_flight_end(inputs, synchronous, tmp_path):
    other, expected = synchronous
    copy_until(other, 3, tmp_path)
    options = overrides(inputs, tmp_path, *SETTINGS)
    assert disturbed("ctrl-c", options) == -signal.SIGINT
    assert latest(tmp_path) == "4\n"
    verify(tmp_path / "global_step_4")
    assert not list(tmp_path.glob("*.tmp"))
    assert hashes(train(options)) == expected


@pytest.mark.parametrize("named", [False, True])
def test_a_run_goes_on_from_remote_copies_when_its_own_disk_is_gone(inputs, synchronous, tmp_path, named):
    _, expected = synchronous
    remote = f"file://{tmp_path}/remote"
    options = overrides(inputs, tmp_path / "run", *SETTINGS, f"trainer.default_hdfs_dir={remote}", KEEP_TWO)
    assert disturbed("training", options) == -signal.SIGKILL
    shutil.rmtree(tmp_path / "run")
    step = int(latest(tmp_path / "remote"))
    assert step <= 3  # uploads may lag behind
    if named:
        options.append(f"trainer.resume_mode={remote}/global_step_{step}")
    assert hashes(train(options)) == expected
    assert latest(tmp_path / "remote") == "6\n"
    for step in (5, 6):
        verify(tmp_path / "remote" / f"global_step_{step}")
