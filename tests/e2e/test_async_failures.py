"""Generation ahead of training, disturbed: interrupts, killed ranks, full disks; and what a resume makes of it."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strop import ActorRolloutRefWorker
from strop.checkpoint.folder import verify
from strop.checkpoint.store import Checkpoints
from strop.cli.main import main
from strop.rewards.worker.process import RewardProcess
from strop.trainer import pipeline
from strop.trainer.ppo import PPO

import forked
from ray_runs import RayRun, trained_weights
from runs import hashes, make_inputs, metrics, overrides, train, undrawn
from small_disk import no_room
from test_async_steps import SETTINGS, slow

INTERRUPTED = 4
QUICK = (*SETTINGS, "trainer.total_training_steps=5", "trainer.test_freq=-1", "trainer.val_before_train=false")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = make_inputs(tmp_path_factory.mktemp("inputs"), rows=16)
    (folder / "reward.py").write_text("def compute_score(solution_str, **rest): return len(solution_str) % 7\n")
    return folder


@pytest.fixture(scope="module")
def undisturbed(inputs) -> Any:
    """Hashes and metrics of the local runs that others must equal, by ``async_steps``."""

    @functools.cache
    def run(steps: int) -> tuple[dict[str, str], list[dict[str, Any]]]:
        folder = inputs / f"undisturbed_{steps}"
        return hashes(train(options_of(inputs, folder, steps))), metrics(folder)

    return run


def options_of(inputs: Path, run: Path, steps: int, *extra: str) -> list[str]:
    reward = f"custom_reward_function.path={inputs / 'reward.py'}"
    return overrides(inputs, run, *QUICK, f"trainer.async_steps={steps}", reward, *extra)


def train_interrupted(options: list[str], waits_for: str) -> None:
    """Send Ctrl-C while the driver waits for batch 4, for which a checkpoint waits, too.

    ``waits_for``: ``samples`` or ``scores``. They come when the checkpoint has begun to wait after Ctrl-C.
    """
    ending = threading.Event()
    end, finish, learn = Checkpoints._end_after_interrupt, PPO.finish, PPO.learn
    generate, evaluate = ActorRolloutRefWorker.generate_sequences, RewardProcess.evaluate_all
    scored = iter(range(1, 100))

    def interrupt(batch: int, phase: str) -> None:
        if batch == INTERRUPTED and phase == waits_for and not ending.is_set():
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()

    def ended(self: Checkpoints) -> None:
        ending.set()
        end(self)

    def finished(self: PPO, generation: Any, **options: Any) -> Any:
        interrupt(generation.batch, "samples")
        return finish(self, generation, **options)

    def learned(self: PPO, samples: Any, iteration: int) -> Any:
        interrupt(iteration, "scores")
        return learn(self, samples, iteration)

    @functools.wraps(generate)
    def generated(self: Any, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        if waits_for == "samples" and prompts.meta_info["batch"] == INTERRUPTED:
            ending.wait(60)
        return generate(self, prompts, *args, **kwargs)

    def evaluated(self: RewardProcess, samples: Any) -> Iterator[Any]:
        held = waits_for == "scores" and next(scored) == INTERRUPTED
        for outcome in evaluate(self, samples):
            yield outcome
            if held:
                ending.wait(60)

    Checkpoints._end_after_interrupt, PPO.finish, PPO.learn = ended, finished, learned
    ActorRolloutRefWorker.generate_sequences, RewardProcess.evaluate_all = generated, evaluated
    with undrawn():
        sys.exit(main(["train", *options]))


@pytest.mark.parametrize(
    ("waits_for", "steps"), [("samples", 1), slow("scores", 1), slow("samples", 4), slow("scores", 4)]
)
def test_an_interrupt_completes_the_checkpoint_whose_samples_are_in_flight(
    inputs, undisturbed, tmp_path, waits_for, steps
):
    options = options_of(inputs, tmp_path, steps)
    done = forked.run(train_interrupted, options, waits_for)
    assert done.returncode == 130, done.stderr[-2000:]
    assert done.stderr.splitlines()[-1].startswith("stopped by Ctrl-C"), done.stderr[-2000:]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == f"{INTERRUPTED - 1}\n"
    verify(tmp_path / f"global_step_{INTERRUPTED - 1}")
    assert (hashes(train(options)), metrics(tmp_path)) == undisturbed(steps)


def train_on_a_full_disk(options: list[str], part: str) -> None:
    """Fail to write a part of the checkpoint of iteration 2."""
    owner, name = {"batch": (pipeline.torch, "save"), "tail": (ActorRolloutRefWorker, "save_in_flight")}[part]
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def write(*args: Any, **kwargs: Any) -> Any:
        if any(part_of_2(argument) for argument in args):
            no_room()
        return plain(*args, **kwargs)

    def part_of_2(argument: Any) -> bool:
        return isinstance(argument, Path) and {"global_step_2.tmp", "in_flight"} <= set(argument.parts)

    pipeline.torch.save = write
    with undrawn():
        sys.exit(main(["train", *options]))


@pytest.mark.slow
@pytest.mark.parametrize("part", ["batch", "tail"])
def test_a_full_disk_names_the_checkpoint_that_lacks_its_samples(inputs, undisturbed, tmp_path, part):
    options = options_of(inputs, tmp_path, 4)
    done = forked.run(train_on_a_full_disk, options, part)
    assert done.returncode == 2, done.stderr[-2000:]
    message = done.stderr.splitlines()[-2:]
    assert "checkpoint of iteration 2 could not be written" in " ".join(message), done.stderr[-2000:]
    assert "No space left on device" in " ".join(message)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1\n"
    assert not list(tmp_path.glob("*.tmp"))
    assert (hashes(train(options)), metrics(tmp_path)) == undisturbed(4)
