"""Generation ahead of training, disturbed by interrupts, full disks and killed ranks, and its resume."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_disk import no_room
from test_async_steps import SETTINGS, slow

from strop import ActorRolloutRefWorker
from strop.checkpoint.folder import saved_steps, verify
from strop.checkpoint.store import Checkpoints
from strop.cli.main import main
from strop.rewards.worker.pool import RewardProcess
from strop.trainer.pipeline import BatchAhead
from strop.trainer.ppo import PPO

import forked
from messages import mentions
from ray_runs import RayRun, trained_weights
from runs import hashes, make_inputs, metrics, overrides, train, undrawn

INTERRUPTED = 4
ON_RAY = ("trainer.worker_group=ray", "+actor_rollout_ref.model.external_lib=saboteur")
TWO_RANKS = (
    "trainer.resource_pools={learner: [2], rollout: [2]}",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "critic.ppo_micro_batch_size_per_gpu=2",
)
QUICK = (
    *SETTINGS,
    "trainer.total_training_steps=5",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = make_inputs(tmp_path_factory.mktemp("inputs"), rows=16)
    (folder / "reward.py").write_text(
        "def compute_score(solution_str, **rest): return len(solution_str) % 7\n"
    )
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
    end, samples_of, learn = Checkpoints._end_after_interrupt, BatchAhead.samples, PPO.learn
    generate, evaluate = ActorRolloutRefWorker.generate_sequences, RewardProcess.evaluate_all
    scored = iter(range(1, 100))

    def interrupt(batch: int, phase: str) -> None:
        if batch == INTERRUPTED and phase == waits_for and not ending.is_set():
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()

    def ended(self: Checkpoints) -> None:
        ending.set()
        end(self)

    def awaited(self: BatchAhead, *args: Any, **options: Any) -> Any:
        interrupt(self.number, "samples")
        return samples_of(self, *args, **options)

    def learned(self: PPO, samples: Any, iteration: int) -> Any:
        interrupt(iteration, "scores")
        return learn(self, samples, iteration)

    @functools.wraps(generate)
    def generated(self: Any, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        if waits_for == "samples" and prompts.meta_info["batch"] == INTERRUPTED:
            ending.wait(60)
        return generate(self, prompts, *args, **kwargs)

    def evaluated(self: RewardProcess, samples: Any) -> Iterator[Any]:
        # The example's samples, before the first batch, come from the main thread.
        is_batch = threading.current_thread() is not threading.main_thread()
        held = waits_for == "scores" and is_batch and next(scored) == INTERRUPTED
        for outcome in evaluate(self, samples):
            yield outcome
            if held:
                ending.wait(60)

    Checkpoints._end_after_interrupt, BatchAhead.samples, PPO.learn = ended, awaited, learned
    ActorRolloutRefWorker.generate_sequences, RewardProcess.evaluate_all = generated, evaluated
    with undrawn():
        sys.exit(main(["train", *options]))


@pytest.mark.parametrize(
    ("waits_for", "steps", "latest"),
    [("samples", 1, INTERRUPTED - 1), slow("scores", 1, INTERRUPTED - 1)],
)
def test_an_interrupt_completes_the_checkpoint_whose_samples_are_in_flight(
    inputs, undisturbed, tmp_path, waits_for, steps, latest
):
    options = options_of(inputs, tmp_path, steps)
    done = forked.run(train_interrupted, options, waits_for)
    assert done.returncode == 130, done.stderr[-2000:]
    assert f"stopped at step {latest}, saved" in done.stderr.splitlines()[-1], done.stderr[-2000:]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == f"{latest}\n"
    verify(tmp_path / f"global_step_{latest}")
    assert (hashes(train(options)), metrics(tmp_path)) == undisturbed(steps)


@pytest.mark.fast("1-1", "4--1")
@pytest.mark.parametrize(("steps", "save_freq"), [(1, 1), (1, -1), (4, 1), (4, -1)])
def test_a_generation_that_fails_is_named_and_costs_no_iteration(
    inputs, tmp_path, monkeypatch, steps, save_freq
):
    generate = ActorRolloutRefWorker.generate_sequences

    @functools.wraps(generate)
    def generated(self: Any, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        if prompts.meta_info["batch"] == INTERRUPTED:
            raise ConnectionError("no engine")
        return generate(self, prompts, *args, **kwargs)

    monkeypatch.setattr(ActorRolloutRefWorker, "generate_sequences", generated)
    options = options_of(inputs, tmp_path, steps, f"trainer.save_freq={save_freq}")
    with pytest.raises(ConnectionError, match=r"^no engine$"):
        train(options)
    latest = saved_steps(tmp_path)[-1]
    assert latest == metrics(tmp_path)[-1]["step"]
    assert not (tmp_path / f"global_step_{latest}" / "in_flight").exists()
    monkeypatch.setattr(ActorRolloutRefWorker, "generate_sequences", generate)
    train(options)
    assert metrics(tmp_path)[-1]["step"] == 5


def train_on_a_full_disk(options: list[str], file: str) -> None:
    """Fail to write one file of the checkpoint of iteration 2."""
    save = torch.save

    def write(state: Any, path: Any) -> None:
        if isinstance(path, Path) and file in path.name and "global_step_2.tmp" in path.parts:
            no_room()
        save(state, path)

    torch.save = write
    with undrawn():
        sys.exit(main(["train", *options]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "says"), [("batch_4", "No space left on device"), ("rank_0", "cannot write")]
)
def test_a_full_disk_names_the_checkpoint_that_lacks_its_samples(inputs, undisturbed, tmp_path, file, says):
    options = options_of(inputs, tmp_path, 4)
    done = forked.run(train_on_a_full_disk, options, file)
    assert done.returncode == 2, done.stderr[-2000:]
    assert mentions(done.stderr, "checkpoint of iteration 2 could not be written", says), done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1\n"
    assert not list(tmp_path.glob("*.tmp"))
    assert (hashes(train(options)), metrics(tmp_path)) == undisturbed(4)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["update_actor", "load_weights"])
def test_a_killed_rank_of_either_side_is_named_and_the_run_ends_as_if_nothing_had_been(
    inputs, tmp_path, method
):
    options = options_of(inputs, tmp_path / "run", 4, *ON_RAY, "trainer.max_restarts=1")
    plan = {"method": method, "call": 6, "rank": 0, "deed": "kill", "marker": str(tmp_path / "marker")}
    run = RayRun(options, sabotage=plan)
    assert run.wait() == 0, run.console[-3000:]
    role = "Actor" if method == "update_actor" else "Rollout"
    assert f"{role} rank 0 on {os.uname().nodename}" in run.console
    assert f"died in {method}" in run.console
    expected = undisturbed_on_ray(inputs, 4)
    assert (trained_weights(tmp_path / "run", 5), metrics(tmp_path / "run")) == expected
    run.wait_until_gone()


@pytest.fixture(scope="module")
def crashed(inputs) -> Path:
    """The folder of a run with two ranks on each side that was killed with samples in flight."""
    folder = inputs / "crashed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STROP_CRASH_AT", "in_flight:4")
        run = RayRun(options_of(inputs, folder, 4, *ON_RAY, *TWO_RANKS))
        assert run.wait() == -signal.SIGKILL, run.console[-3000:]
        run.wait_until_gone()
    return folder


@pytest.mark.slow
def test_two_ranks_on_each_side_resume_to_equal_numbers(inputs, tmp_path, crashed):
    shutil.copytree(crashed, tmp_path / "run")
    again = RayRun(options_of(inputs, tmp_path / "run", 4, *ON_RAY, *TWO_RANKS))
    assert again.wait() == 0, again.console[-3000:]
    expected = undisturbed_on_ray(inputs, 4, *TWO_RANKS)
    assert (trained_weights(tmp_path / "run", 5), metrics(tmp_path / "run")) == expected


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_rollout_processes(inputs, tmp_path, crashed):
    """As after the loss of a node: what was in flight is generated again."""
    shutil.copytree(crashed, tmp_path / "run")
    options = options_of(inputs, tmp_path / "run", 4, *ON_RAY, *TWO_RANKS)
    again = RayRun([*options, "trainer.resource_pools={learner: [2], rollout: [1]}"])
    assert again.wait() == 0, again.console[-3000:]
    assert "2 rollout processes, now 1" in again.console
    assert metrics(tmp_path / "run")[-1]["step"] == 5


@functools.cache
def undisturbed_on_ray(inputs: Path, steps: int, *extra: str) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Weights and metrics of an undisturbed run."""
    folder = inputs / f"ray_{steps}_{len(extra)}"
    run = RayRun(options_of(inputs, folder, steps, *ON_RAY, *extra))
    assert run.wait() == 0, run.console[-3000:]
    return trained_weights(folder, 5), metrics(folder)
