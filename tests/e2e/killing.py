"""Runs that end by kill -9 at a chosen point, in a forked process, and the run folders they start from."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import forked
from runs import train

ROWS = 16  # two iterations per epoch
# Everything that a resume has to restore: adaptive KL, shuffled mini-batches, several epochs of updates.
SETTINGS = (
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.kl_coef=0.1",
    "algorithm.kl_ctrl.horizon=200",
    "actor_rollout_ref.actor.ppo_epochs=2",
    "actor_rollout_ref.actor.shuffle=true",
    "trainer.total_training_steps=4",
    "trainer.save_freq=1",
    "trainer.test_freq=2",
)


def kill(point: str, iteration: int, options: list[str]) -> None:
    """Train with ``options`` and die at a crash point (see ``strop.files``) of ``iteration``."""
    done = forked.run(train, options, env={"STROP_CRASH_AT": f"{point}:{iteration}"})
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]


def copy_until(run: Path, step: int, to: Path) -> None:
    """Copy the folder of a run that keeps all its checkpoints, as it was when it had saved ``step``.

    Its metrics go on beyond ``step``, as those of a run that was killed later do.
    """
    shutil.copytree(run, to, dirs_exist_ok=True)
    for folder in to.glob("global_step_*"):
        if int(folder.name.removeprefix("global_step_")) > step:
            shutil.rmtree(folder)
    (to / "latest_checkpointed_iteration.txt").write_text(f"{step}\n")
