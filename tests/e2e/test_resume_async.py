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
from killing import ROWS, copy_until
from runs import hashes, make_inputs, metrics, overrides, saved_state, train

SETTINGS = (
    "trainer.total_training_steps=4",
    "trainer.save_freq=1",
    "trainer.async_save=true",
)
KEEP_TWO = "trainer.max_ckpt_to_keep=2"
LATEST = "latest_checkpointed_iteration.txt"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"), rows=ROWS)


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


def writes_critic_of_3(writer: FileSystemWriter, *_: Any) -> bool:
    return Path(writer.path).parts[-2:] == ("global_step_3.tmp", "critic")


def starts_4(trainer: RayPPOTrainer, *_: Any) -> bool:
    return trainer.global_step + 1 == 4


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def train_until(stage: str, options: list[str], *awaited: Path) -> None:
    """Train and end in ``stage`` of the background save of iteration 3, with the files ``awaited``.

    Stages without a line here are crash points.
    """

    def die() -> None:
        while not all(path.exists() for path in awaited):
            time.sleep(0.01)
        send(signal.SIGKILL)

    if stage == "write":
        before(FileSystemWriter, "write_data", writes_critic_of_3, die)
    elif stage == "metadata":
        before(FileSystemWriter, "finish", writes_critic_of_3, die)
    elif stage == "training":
        before(FileSystemWriter, "write_data", writes_critic_of_3, partial(time.sleep, 10_000))
        before(RayPPOTrainer, "step", starts_4, die)
    elif stage == "ctrl-c":
        before(FileSystemWriter, "write_data", writes_critic_of_3, partial(time.sleep, 1))
        before(RayPPOTrainer, "step", starts_4, partial(send, signal.SIGINT))
    train(options)


def disturbed(stage: str, options: list[str], *awaited: Path) -> int:
    """Exit status of a run that ends in ``stage``."""
    done = forked.run(train_until, stage, options, *awaited, env={"STROP_CRASH_AT": f"{stage}:3"})
    assert done.returncode in (-signal.SIGKILL, -signal.SIGINT), done.stderr[-2000:]
    return done.returncode


def latest(run: Path) -> str:
    return (run / LATEST).read_text()


@pytest.mark.slow
def test_checkpoints_written_in_the_background_are_the_synchronous_ones(inputs, synchronous, tmp_path):
    other, expected = synchronous
    assert hashes(train(overrides(inputs, tmp_path, *SETTINGS, KEEP_TWO))) == expected
    assert metrics(tmp_path) == metrics(other)
    kept = sorted(path.name for path in tmp_path.glob("global_step_*"))
    assert kept == ["global_step_3", "global_step_4"]
    for name in kept:
        verify(tmp_path / name)
        for role in ("actor", "critic"):
            found, wanted = saved_state(tmp_path / name / role), saved_state(other / name / role)
            assert found.keys() == wanted.keys()
            assert any(key.startswith("optimizer.") for key in found)
            assert all(torch.equal(found[key], wanted[key]) for key in found)


def slow(stage: str) -> Any:
    """A neighbour of the other stages."""
    return pytest.param(stage, marks=pytest.mark.slow)


@pytest.mark.fast("latest", "training")
@pytest.mark.parametrize("stage", ["write", slow("metadata"), "training", "seal", slow("rename"), "latest"])
def test_a_run_killed_while_it_saves_in_the_background_continues_to_the_same_numbers(
    inputs, synchronous, tmp_path, stage
):
    other, expected = synchronous
    copy_until(other, 2, tmp_path)
    options = overrides(inputs, tmp_path, *SETTINGS, KEEP_TWO)
    assert disturbed(stage, options) == -signal.SIGKILL
    assert latest(tmp_path) == "2\n"
    verify(tmp_path / "global_step_2")
    assert hashes(train(options)) == expected
    assert metrics(tmp_path) == metrics(other)
    kept = sorted(path.name for path in tmp_path.glob("global_step_*"))
    assert kept == ["global_step_3", "global_step_4"]


def test_ctrl_c_lets_the_save_in_flight_end(inputs, synchronous, tmp_path):
    other, expected = synchronous
    copy_until(other, 2, tmp_path)
    options = overrides(inputs, tmp_path, *SETTINGS)
    assert disturbed("ctrl-c", options) == -signal.SIGINT
    assert latest(tmp_path) == "3\n"
    verify(tmp_path / "global_step_3")
    assert not list(tmp_path.glob("*.tmp"))
    assert hashes(train(options)) == expected


def test_a_run_goes_on_from_remote_copies_when_its_own_disk_is_gone(inputs, synchronous, tmp_path):
    _, expected = synchronous
    remote = tmp_path / "remote"
    options = overrides(
        inputs, tmp_path / "run", *SETTINGS, f"trainer.default_hdfs_dir=file://{remote}", KEEP_TWO
    )
    assert disturbed("training", options, remote / LATEST) == -signal.SIGKILL
    shutil.rmtree(tmp_path / "run")
    assert int(latest(remote)) <= 2  # uploads may lag behind
    assert hashes(train(options)) == expected
    assert latest(remote) == "4\n"
    for step in (3, 4):
        verify(remote / f"global_step_{step}")
