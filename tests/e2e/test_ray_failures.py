"""Two processes, one of them killed in each phase; drivers and whole Ray sessions killed; hangs.

Nothing here is measured in seconds: other runs have the cores meanwhile.
"""

from __future__ import annotations

import os

import pytest

from messages import mentions
from ray_runs import RayRun, trained_weights
from runs import make_inputs, metrics, overrides

pytestmark = pytest.mark.slow
STEPS = 4
SETTINGS = (
    "trainer.n_gpus_per_node=2",
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=1",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "critic.ppo_micro_batch_size_per_gpu=2",
    "+actor_rollout_ref.model.external_lib=saboteur",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def undisturbed(inputs):
    run = RayRun(overrides(inputs, inputs / "undisturbed", *SETTINGS))
    assert run.wait() == 0, run.console[-3000:]
    run.wait_until_gone()
    return trained_weights(inputs / "undisturbed", STEPS), metrics(inputs / "undisturbed")


def sabotage(tmp_path, method: str, call: int, deed: str = "kill"):
    """Let rank 1 do ``deed`` once in this call of ``method``; see ``saboteur.py``."""
    return {"method": method, "call": call, "rank": 1, "deed": deed, "marker": str(tmp_path / "marker")}


PHASES = [("generate_sequences", 3), ("state.save", 5)]


@pytest.mark.parametrize(("method", "call"), PHASES)
def test_a_killed_worker_is_named_and_the_run_ends_as_if_nothing_had_been(
    inputs, undisturbed, tmp_path, method, call
):
    options = overrides(inputs, tmp_path / "run", *SETTINGS, "trainer.max_restarts=1")
    run = RayRun(options, sabotage=sabotage(tmp_path, method, call))
    assert run.wait() == 0, run.console[-3000:]
    phase = "save_checkpoint" if method == "state.save" else method
    assert f"rank 1 on {os.uname().nodename}" in run.console
    assert f"died in {phase}" in run.console
    assert f"about to kill in {method}" in run.console.split("its last output")[1]
    assert (trained_weights(tmp_path / "run", STEPS), metrics(tmp_path / "run")) == undisturbed
    run.wait_until_gone()


def test_a_run_goes_on_after_all_of_ray_was_killed(inputs, undisturbed, tmp_path):
    options = overrides(inputs, tmp_path / "run", *SETTINGS)
    run = RayRun(options, sabotage=sabotage(tmp_path, "update_actor", 5, "sleep"))
    run.wait_until_struck()
    assert run.listens_on() == {"127.0.0.1"}
    killed = run.kill(lambda command: "strop.trainer.main_ppo" not in command)
    assert any("raylet" in command for command in killed)
    assert any("gcs_server" in command for command in killed)
    assert run.wait() != 0
    assert mentions(run.console, "head of the Ray cluster")
    run.wait_until_gone()
    again = RayRun(options)
    assert again.wait() == 0, again.console[-3000:]
    assert (trained_weights(tmp_path / "run", STEPS), metrics(tmp_path / "run")) == undisturbed


def test_a_rank_that_sleeps_for_ever_is_named_with_its_stack(inputs, tmp_path):
    run = RayRun(
        overrides(inputs, tmp_path / "run", *SETTINGS, "trainer.phase_timeout_s=15"),
        sabotage=sabotage(tmp_path, "update_actor", 2, "sleep"),
    )
    assert run.wait() == 2
    assert "ActorRollout: rank 1 on" in run.console
    assert mentions(run.console, "update_actor", "15 s", "trainer.phase_timeout_s")
    own = run.console.split("--- rank 1 on")[1].split("--- rank 0 on")[0]
    assert "saboteur.py" in own
    assert "time.sleep(10_000)" in own
    assert "--- rank 0 on" in run.console
    run.wait_until_gone()
