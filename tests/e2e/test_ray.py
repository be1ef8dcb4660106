"""One-rank runs on Ray: equal to local ones, and what is left when they are ended from outside."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest

from strop.checkpoint.folder import verify

import forked
from messages import mentions
from ray_runs import RayRun, trained_weights
from runs import make_inputs, metrics, overrides, train

STEPS = 2
SETTINGS = (
    "trainer.worker_group=ray",
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=1",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "+actor_rollout_ref.model.external_lib=saboteur",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def undisturbed(inputs):
    train(overrides(inputs, inputs / "undisturbed", *SETTINGS, "trainer.worker_group=local"))
    return _results(inputs / "undisturbed")


def _results(run):
    return trained_weights(run, STEPS), metrics(run)


def _sabotage(tmp_path, method, call, deed):
    return {"method": method, "call": call, "rank": 0, "deed": deed, "marker": str(tmp_path / "marker")}


ENDS = {"Ctrl-C": 130, "SIGTERM": 143, "SIGKILL": -9}


@pytest.mark.parametrize(
    ("how", "background", "during", "ranks"),
    [
        ("SIGTERM", True, ("update_actor", 3), 1),
        pytest.param("SIGKILL", False, ("update_actor", 3), 1, marks=pytest.mark.slow),
        pytest.param("SIGTERM", False, ("save_checkpoint", 3), 2, marks=pytest.mark.slow),
        pytest.param("Ctrl-C", True, ("save_checkpoint", 3), 2, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_ended_from_outside_leaves_nothing(inputs, tmp_path, how, background, during, ranks):
    """``background``: the save of iteration 1 is in flight, and a call of the same worker hangs.

    Actor and critic share a process, and calls of both count: the third save is the actor's of iteration 2.
    """
    extra = (f"trainer.async_save={background}", f"trainer.n_gpus_per_node={ranks}")
    run = RayRun(
        overrides(inputs, tmp_path / "run", *SETTINGS, *extra),
        sabotage=_sabotage(tmp_path, *during, "sleep"),
    )
    run.wait_until_struck()
    commands = " ".join(run.processes().values())
    assert all(name in commands for name in ("raylet", "gcs_server"))
    assert run.listens_on() == {"127.0.0.1"}
    shared_memory = run.shared_memory()
    # Of Ray's store at least, which is in /tmp where /dev/shm is smaller, as in a container.
    assert shared_memory or shutil.disk_usage("/dev/shm").free < 0.3 * psutil.virtual_memory().total
    token = run.token()
    assert token.stat().st_mode & 0o777 == 0o600

    def end() -> None:
        if how == "Ctrl-C":  # as a terminal sends it: to every process of the group
            os.killpg(run.process.pid, signal.SIGINT)
        else:
            run.process.send_signal(getattr(signal, how))

    end()
    if how != "SIGKILL":  # the iteration is waited for, until a second one
        run.wait_for("stopping when the iteration")
        time.sleep(1)  # at once it would count as the same
        end()
    assert run.wait() == ENDS[how]
    run.wait_until_gone()
    assert not [file.name for file in os.scandir("/dev/shm") if file.inode() in shared_memory]
    assert not token.parent.exists()
    if how != "SIGKILL":
        own = [line for _, line in run.lines if "WorkerHost pid=" not in line]  # theirs may come after it
        assert mentions(own[-1], f"{how}: stopped", "step 1", "the same command goes on")
        assert "Traceback" not in run.console
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "1\n"
    verify(tmp_path / "run" / "global_step_1")


@pytest.mark.slow
def test_a_killed_gcs_is_named_and_the_run_resumes(inputs, undisturbed, tmp_path):
    options = overrides(inputs, tmp_path / "run", *SETTINGS)
    run = RayRun(options, sabotage=_sabotage(tmp_path, "update_actor", 3, "sleep"))
    run.wait_until_struck()
    assert run.kill(lambda command: "/gcs_server " in command)
    assert run.wait() == 2
    run.wait_until_gone()
    assert mentions(run.console, "WorkerError", "head of the Ray cluster")
    assert mentions(run.console, "update_actor", "ActorRollout")
    assert "Traceback" not in run.console
    again = RayRun(options)
    assert again.wait() == 0, again.console[-3000:]
    assert _results(tmp_path / "run") == undisturbed


@pytest.mark.slow
def test_a_gcs_that_is_killed_after_the_last_step_is_named(inputs, tmp_path):
    options = ("trainer.save_freq=-1", "trainer.logger=[gcs_killer:Killer]")
    run = RayRun(overrides(inputs, tmp_path / "run", *SETTINGS, *options))
    assert run.wait() == 2, run.console[-3000:]
    run.wait_until_gone()
    assert mentions(run.console, "WorkerError", "head of the Ray cluster")
    assert "Traceback" not in run.console
    assert "gcs_rpc_client" not in run.console


@pytest.mark.slow
def test_a_killed_raylet_takes_its_workers_along_and_the_run_starts_again(inputs, undisturbed, tmp_path):
    run = RayRun(
        overrides(inputs, tmp_path / "run", *SETTINGS, "trainer.max_restarts=1"),
        sabotage=_sabotage(tmp_path, "update_actor", 3, "sleep"),
    )
    run.wait_until_struck()
    assert run.kill(lambda command: "/raylet " in command)
    assert run.wait() == 0, run.console[-3000:]
    run.wait_until_gone()
    assert "ActorRollout rank 0 on" in run.console
    assert mentions(run.console, "update_actor")
    assert "Traceback" not in run.console
    assert _results(tmp_path / "run") == undisturbed


@pytest.mark.slow
def test_ray_that_dies_while_it_starts_is_named_and_started_again(inputs, undisturbed, tmp_path):
    run = RayRun(overrides(inputs, tmp_path / "run", *SETTINGS, "trainer.max_restarts=1"))
    deadline = time.time() + 120
    while not run.kill(lambda command: "/gcs_server " in command):
        assert time.time() < deadline
        time.sleep(0.05)
    assert run.wait() == 0, run.console[-3000:]
    assert any("Ray did not start" in line and "gcs_server" in line for _, line in run.lines)
    assert _results(tmp_path / "run") == undisturbed
    run.wait_until_gone()


@pytest.mark.slow
def test_a_run_gives_up_after_the_last_restart(inputs, tmp_path):
    options = overrides(inputs, tmp_path / "run", *SETTINGS, "trainer.max_restarts=1")
    run = RayRun(options, sabotage={**_sabotage(tmp_path, "update_actor", 1, "kill"), "again": True})
    assert run.wait() == 2, run.console[-3000:]
    assert run.console.count("0 restarts left") == 1
    assert run.console.count("died in update_actor; its last output:\nabout to kill in update_actor") == 2
    run.wait_until_gone()


@pytest.mark.slow
def test_an_error_that_would_come_again_is_not_tried_again(inputs, tmp_path):
    options = overrides(inputs, tmp_path / "run", *SETTINGS, "trainer.max_restarts=3")
    run = RayRun(options, sabotage=_sabotage(tmp_path, "compute_log_prob", 1, "give up"))
    assert run.wait() == 2, run.console[-3000:]
    assert "restarts left" not in run.console
    assert "WorkerError: ActorRollout rank 0 on" in run.console
    assert mentions(run.console, "compute_log_prob", "ModelError: the saboteur has the weights")
    assert "Traceback" not in run.console


@pytest.mark.slow
def test_a_cluster_that_is_not_there_is_an_error_at_once(inputs, tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"  # nobody listens
        command = ["-m", "strop.trainer.main_ppo", *overrides(inputs, tmp_path, *SETTINGS)]
        environment = {"RAY_ADDRESS": address, "PYTHONPATH": str(Path(__file__).parent)}
        done = forked.run(command, env=environment)
    assert done.returncode == 2
    assert mentions(done.stderr, "ConfigError", "Ray", address)
