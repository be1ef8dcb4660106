"""Saving in the background: the same numbers, kill -9 in every stage of it, Ctrl-C, and remote copies."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from strop.checkpoint.folder import verify
from strop.engines.torch.state import stored_shapes

from runs import hashes, make_inputs, metrics, overrides, train

SETTINGS = (
    "trainer.total_training_steps=6",
    "trainer.save_freq=1",
    "trainer.max_ckpt_to_keep=2",
    "trainer.async_save=true",
)
# Ends the process while the checkpoint of iteration 4 is saved in the background, in the stage argv[1].
DISTURBED = """
    import os, signal, sys, time
    from pathlib import Path
    sys.path[:0] = sys.argv[2:5]
    import conftest
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from strop.checkpoint import folder as checkpoint_folder, store as checkpoint
    from strop.trainer import ray_trainer
    from runs import train

    stage = sys.argv[1]

    def before(owner, name, when, deed):
        original = getattr(owner, name)
        def wrapped(*args, **kwargs):
            if when(*args):
                deed()
            return original(*args, **kwargs)
        setattr(owner, name, wrapped)

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def critic_of_4(writer, *args):
        return Path(writer.path).parts[-2:] == ("global_step_4.tmp", "critic")

    def fifth(trainer, *args):
        return trainer.global_step + 1 == 5

    def building_4(path, *args):
        return path.name == "global_step_4.tmp"

    if stage == "write":
        before(FileSystemWriter, "write_data", critic_of_4, die)
    elif stage == "metadata":
        before(FileSystemWriter, "finish", critic_of_4, die)
    elif stage == "training":
        before(FileSystemWriter, "write_data", critic_of_4, lambda: time.sleep(10_000))
        before(ray_trainer.RayPPOTrainer, "step", fifth, die)
    elif stage == "seal":
        before(checkpoint, "seal", building_4, die)
    elif stage == "rename":
        before(Path, "rename", building_4, die)
    elif stage == "latest":
        before(checkpoint_folder, "atomic_write_text", lambda path, text: text == "4\\n", die)
    elif stage == "ctrl-c":
        before(FileSystemWriter, "write_data", critic_of_4, lambda: time.sleep(1))
        before(ray_trainer.RayPPOTrainer, "step", fifth, lambda: os.kill(os.getpid(), signal.SIGINT))
    else:
        raise SystemExit(f"unknown stage {stage}")
    train(sys.argv[5:])
    raise SystemExit("the run was not disturbed")
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def synchronous(inputs):
    """The run that all others must equal."""
    run = inputs / "synchronous"
    return run, hashes(train(overrides(inputs, run, *SETTINGS, "trainer.async_save=false")))


def disturbed(stage: str, options: list[str]) -> int:
    """The exit status of a run that ended in ``stage``."""
    here = Path(__file__).parent
    folders = [str(here.parent), str(here), str(here.parents[1] / "examples")]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(DISTURBED), stage, *folders, *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert "was not disturbed" not in done.stderr
    return done.returncode


def latest(run: Path) -> str:
    return (run / "latest_checkpointed_iteration.txt").read_text()


def state(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {
        name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in stored_shapes(folder).items()
    }
    dcp.load(tensors, checkpoint_id=str(folder), no_dist=True)
    return tensors


def test_checkpoints_written_in_the_background_are_the_synchronous_ones(inputs, synchronous, tmp_path):
    other, expected = synchronous
    assert hashes(train(overrides(inputs, tmp_path, *SETTINGS))) == expected
    assert metrics(tmp_path) == metrics(other)
    kept = sorted(path.name for path in tmp_path.glob("global_step_*"))
    assert kept == ["global_step_5", "global_step_6"]
    for name in kept:
        verify(tmp_path / name)
        for role in ("actor", "critic"):
            found, wanted = state(tmp_path / name / role), state(other / name / role)
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
def test_a_run_killed_while_it_saves_in_the_background_goes_on_to_the_same_numbers(
    inputs, synchronous, tmp_path, stage
):
    other, expected = synchronous
    options = overrides(inputs, tmp_path, *SETTINGS)
    assert disturbed(stage, options) == -signal.SIGKILL
    assert latest(tmp_path) == "3\n"
    verify(tmp_path / "global_step_3")
    assert hashes(train(options)) == expected
    assert metrics(tmp_path) == metrics(other)
    kept = sorted(path.name for path in tmp_path.glob("global_step_*"))
    assert kept == ["global_step_5", "global_step_6"]


def test_ctrl_c_lets_the_save_in_flight_end(inputs, synchronous, tmp_path):
    _, expected = synchronous
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
    options = overrides(inputs, tmp_path / "run", *SETTINGS, f"trainer.default_hdfs_dir={remote}")
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
