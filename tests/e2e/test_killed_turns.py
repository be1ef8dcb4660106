"""Runs with an environment that are killed at random moments end with the weights of an undisturbed one."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import lookup_task
from runs import metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

AHEAD = (*lookup_task.AHEAD, "trainer.async_steps=2")
ON_RAY = ("trainer.n_gpus_per_node=2", "trainer.worker_group=ray")
SMALL = ("data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16")
SETTINGS = {
    "one process": ((), ("driver", "child")),
    "asynchronous": (AHEAD, ("child", "driver")),
    "two ranks on Ray": (ON_RAY, ("rank", "driver")),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return lookup_task.make(tmp_path_factory.mktemp("inputs"), steps=210, rows=2_000)


def _started(options: list[str], log: Path) -> subprocess.Popen:
    environment = {**os.environ, "RAY_ADDRESS": "local", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([*filter(None, sys.path)])
    with log.open("ab") as output:
        command = [sys.executable, "-m", "strop.trainer.main_ppo", *options]
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment)


def _victim(run: subprocess.Popen, kind: str) -> psutil.Process:
    """The driver, a process of its environment, or a rank on Ray."""
    driver = psutil.Process(run.pid)
    if kind == "driver":
        return driver
    name = {"child": r"strop\.environments\.child", "rank": r"ray::(?!IDLE|\w*Agent)"}[kind]
    while run.poll() is None:  # it begins with the first sample
        for one in driver.children(recursive=True):
            if re.search(name, _command(one)):
                return one
        time.sleep(0.05)
    raise AssertionError(f"the run has ended, and no {kind} was found")


def _command(process: psutil.Process) -> str:
    """The command line; "" of a process that has ended meanwhile."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _n_lines(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_that_is_killed_at_random_moments_ends_with_the_same_weights(inputs, tmp_path, name):
    extra, kinds = SETTINGS[name]
    keys = (*extra, *SMALL, "trainer.save_freq=1", "trainer.total_training_steps=8")
    undisturbed, run, log = tmp_path / "undisturbed", tmp_path / "run", tmp_path / "log"
    lookup_task.delay(inputs, 0.0)
    assert _started(lookup_task.options(inputs, undisturbed, *keys), log).wait() == 0, log.read_text()[-3000:]

    lookup_task.delay(inputs, 0.2)
    command = lookup_task.options(inputs, run, *keys)
    draw, process = random.Random(name), None
    for number, kind in enumerate(kinds):
        if process is None or process.poll() is not None:
            process = _started(command, log)
        before = _n_lines(run)
        # a line without a checkpoint is dropped by the resume
        while process.poll() is None and _n_lines(run) <= before:
            time.sleep(0.05)
        assert process.poll() in (None, 0), log.read_text()[-3000:]
        time.sleep(moment := draw.uniform(0, 1.5))
        assert process.poll() is None, "the run has ended before it was killed"
        victim = _victim(process, kind)
        command_line = _command(victim)
        print(f"kill {number}: {command_line[-60:]} {moment:.2f} s after line {_n_lines(run)}")
        is_of_environment = "environments.child" in command_line
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
        if not is_of_environment:  # whose death ends no run
            process.wait()
    if process.wait():
        assert _started(command, log).wait() == 0, log.read_text()[-3000:]
    assert _digest(run) == _digest(undisturbed)
    assert metrics(run) == metrics(undisturbed)
    assert metrics(run)[-1]["turns/mean"] > 1


def _digest(run: Path) -> str:
    return hashlib.sha256((run / "final_model" / "model.safetensors").read_bytes()).hexdigest()
