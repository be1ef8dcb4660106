"""Programs late at random, impatient, behind a proxy or killed train the weights of the environment."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import agent_programs
import processes
import pytest
import ray

from strop.tracking.jsonl import read_metrics

import lookup_task
from outside import require_vllm
from runs import hashes, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SMALL = (
    "data.train_batch_size=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "trainer.total_training_steps=6",
)
# Each answer is a process of a shell, of curl and of jq: 600 of 16 prompts, four batches ahead.
SMALLEST = (*SMALL, "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
AHEAD = tuple(option for option in lookup_task.AHEAD if "rollout_is" not in option)
SETTINGS = {
    "synchronous": (),
    "async 4": (*AHEAD, "trainer.async_steps=4"),
    "two ranks": ("trainer.n_gpus_per_node=2", "trainer.worker_group=ray"),
    "vllm": ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.gpu_memory_utilization=0.1"),
}
KINDS = ("critic/", "actor/", "turns/mean", "response")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return agent_programs.write(lookup_task.make(tmp_path_factory.mktemp("inputs"), steps=210, rows=2_000))


def _trained(options: list[str], run: Path) -> tuple[dict, list]:
    trainer = train(options)
    found = hashes(trainer)
    trainer.shutdown()
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["step"]]
    return found, [{name: line[name] for name in line if name.startswith(KINDS)} for line in lines]


CURL = [("async 4", "curl")]


@pytest.fixture
def program(request) -> str:
    if request.param == "curl" and not (shutil.which("curl") and shutil.which("jq")):
        pytest.skip("curl and jq are not installed")
    return request.param


@pytest.mark.parametrize(
    ("name", "program"), [*((name, "openai") for name in SETTINGS), *CURL], indirect=["program"]
)
def test_a_program_trains_the_weights_of_the_environment_in_every_setting(
    inputs, tmp_path, monkeypatch, name, program, request
):
    if name == "vllm":
        require_vllm()
    if name == "two ranks":
        request.getfixturevalue("ray_session")
    found = []
    for case, (delay, patience) in {"native": (0.0, 60.0), "late": (0.5, 1.0)}.items():
        lookup_task.delay(inputs, delay)
        agent_programs.patience(inputs, patience)
        if case == "late":
            monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
            monkeypatch.delenv("NO_PROXY", raising=False)
        size = SMALLEST if program == "curl" else SMALL
        options = lookup_task.options(inputs, tmp_path / case, *size, *SETTINGS[name])
        if case != "native":
            options = agent_programs.of_program(options, inputs, program)
        found.append(_trained(options, tmp_path / case))
    if name == "two ranks":
        ray.shutdown()  # of this module nothing else needs it, and it takes a tenth of a core
    print(name, found[0][0])  # with -s
    assert found[1] == found[0]
    assert found[0][1][-1]["turns/mean"] > 1


@pytest.mark.parametrize(("name", "program"), [("synchronous", "openai"), *CURL], indirect=["program"])
def test_a_run_that_is_killed_amid_programs_ends_with_the_same_weights(
    inputs, tmp_path, monkeypatch, name, program
):
    monkeypatch.setenv("STROP_TEST_TOKEN", str(tmp_path))
    size = SMALLEST if program == "curl" else SMALL
    keys = (*size, *SETTINGS[name], "trainer.save_freq=1")
    agent_programs.patience(inputs, 60.0)
    digests = []
    for run, n_kills in ((tmp_path / "undisturbed", 0), (tmp_path / "run", 2)):
        lookup_task.delay(inputs, 0.3 if n_kills else 0.0)
        options = agent_programs.of_program(lookup_task.options(inputs, run, *keys), inputs, program)
        draw, log = random.Random(name), tmp_path / "log"
        for _ in range(n_kills):
            process, before = _started(options, log), _n_lines(run)
            while process.poll() is None and _n_lines(run) == before:
                time.sleep(0.05)
            time.sleep(draw.uniform(0, 2.0))
            process.kill()
            process.wait()
        assert _started(options, log).wait() == 0, log.read_text()[-3000:]
        digests.append(hashlib.sha256((run / "final_model" / "model.safetensors").read_bytes()).hexdigest())
    assert digests[0] == digests[1]
    assert processes.none_left(lambda: processes.with_token(str(tmp_path)))


def _started(options: list[str], log: Path) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([*filter(None, sys.path)])
    with log.open("ab") as output:
        command = [sys.executable, "-m", "strop.trainer.main_ppo", *options]
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment)


def _n_lines(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0
