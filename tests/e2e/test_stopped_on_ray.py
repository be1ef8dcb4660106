"""Runs on Ray that are stopped amid a long generation: saved before its end, and equal numbers in the end."""

from __future__ import annotations

import os
import signal
import time

import pytest

from strop.checkpoint.folder import saved_steps, verify

from messages import mentions
from ray_runs import RayRun, trained_weights
from runs import make_inputs, metrics, overrides, train

TOKENS = 192
SETTINGS = (
    "trainer.n_gpus_per_node=2",
    "trainer.worker_group=ray",
    "trainer.total_training_steps=3",
    "trainer.save_freq=3",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    f"data.max_response_length={TOKENS}",
    "actor_rollout_ref.rollout.ignore_eos=true",
    "+actor_rollout_ref.model.external_lib=saboteur",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = make_inputs(tmp_path_factory.mktemp("inputs"))
    (folder / "reward.py").write_text("def compute_score(solution_str): return len(solution_str) % 2\n")
    return folder


@pytest.mark.slow
def test_ranks_leave_a_generation_for_the_last_save(inputs, tmp_path, ray_session):
    """Each of the last iteration's tokens takes half a second, and the ranks hear of the stop apart."""
    folders = tmp_path / "run", tmp_path / "undisturbed"
    settings = *SETTINGS, f"custom_reward_function.path={inputs / 'reward.py'}"
    stopped, undisturbed = (overrides(inputs, folder, *settings) for folder in folders)
    sabotage = {"method": "generate_sequences", "call": 3, "rank": None, "again": True, "deed": "crawl"}
    run = RayRun(stopped, sabotage=sabotage | {"marker": str(tmp_path / "marker")})

    def steps() -> list[int]:
        return [path.stat().st_size for path in tmp_path.glob("marker.next_tokens.*")]

    run.wait_until_struck()
    while len(steps()) < 2 or min(steps()) < 5:  # amid it
        assert run.process.poll() is None, run.console[-3000:]
        time.sleep(0.1)
    os.killpg(run.process.pid, signal.SIGTERM)
    assert run.wait() == 143, run.console[-3000:]
    assert max(steps()) < TOKENS
    assert mentions(run.console, "SIGTERM: stopped at step 2, saved; the same command goes on")
    assert not mentions(run.console, "rror")
    assert saved_steps(folders[0]) == [2]
    verify(folders[0] / "global_step_2")
    run.wait_until_gone()
    for options in (stopped, undisturbed):
        train(options).shutdown()
    assert trained_weights(folders[0], 3) == trained_weights(folders[1], 3)
    assert metrics(folders[0]) == metrics(folders[1])
