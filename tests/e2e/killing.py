"""Runs that end by kill -9, in a process of their own, wherever a test wants it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

# Everything that a resume has to bring back: adaptive KL, shuffled mini-batches, several epochs of updates.
SETTINGS = (
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.kl_coef=0.1",
    "algorithm.kl_ctrl.horizon=200",
    "actor_rollout_ref.actor.ppo_epochs=2",
    "actor_rollout_ref.actor.shuffle=true",
    "trainer.total_training_steps=6",
    "trainer.save_freq=1",
    "trainer.test_freq=2",
    "trainer.max_ckpt_to_keep=2",
)
# Ends the process, as a power cut would, in the phase that argv[1] names, of the iteration argv[2].
DISTURBED = """
    import os, signal, sys
    from pathlib import Path
    sys.path[:0] = [sys.argv[3], sys.argv[4], sys.argv[5]]
    import conftest
    from strop.checkpoint import folder as checkpoint_folder, store as checkpoint
    from strop.engines.torch import engine
    from strop.tracking import trackers
    from strop.trainer import ppo
    from runs import train

    phase, iteration = sys.argv[1], int(sys.argv[2])

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def before(owner, name, when):
        original = getattr(owner, name)
        def wrapped(*args, **kwargs):
            if when(*args):
                die()
            return original(*args, **kwargs)
        setattr(owner, name, wrapped)

    def saving(folder):
        return folder.name == f"global_step_{iteration}.tmp"

    if phase == "update":
        before(ppo.PPO, "start_actor_update", lambda ppo, batch, timer, now, *_: now == iteration)
    elif phase == "log":
        before(trackers.Tracking, "log", lambda tracking, step, metrics: step == iteration)
    elif phase == "state":
        critic = lambda module, optimizer, folder: saving(folder.parent) and folder.name == "critic"
        before(engine.state, "save", critic)
    elif phase == "seal":
        before(checkpoint, "seal", saving)
    elif phase == "rename":
        before(Path, "rename", lambda path, target: saving(path))
    elif phase == "latest":
        before(checkpoint_folder, "atomic_write_text", lambda path, text: "latest" in path.name and
               (path.parent / f"global_step_{iteration}").exists())
    else:
        raise SystemExit(f"unknown phase {phase}")
    train(sys.argv[6:])
    raise SystemExit("the run was not disturbed")
"""


def kill(phase: str, iteration: int, options: list[str]) -> None:
    """Train with ``options`` and die in ``phase`` of ``iteration``."""
    here = Path(__file__).parent
    folders = [str(here.parent), str(here), str(here.parents[1] / "examples")]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(DISTURBED), phase, str(iteration), *folders, *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
