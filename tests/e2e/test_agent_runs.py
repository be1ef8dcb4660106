"""Agent programs that say what an environment says train the same weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import agent_programs
import pytest

from strop.tracking.jsonl import read_metrics

import lookup_task
from runs import hashes, train

SMALL = (
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "trainer.total_training_steps=3",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return agent_programs.write(lookup_task.make(tmp_path_factory.mktemp("inputs"), steps=100))


def _trained(inputs: Path, run: Path, *extra: str, program: str = "") -> tuple[dict, list]:
    options = lookup_task.options(inputs, run, *SMALL, *extra)
    trainer = train(agent_programs.of_program(options, inputs, program) if program else options)
    found = hashes(trainer)
    trainer.shutdown()
    kept = [
        {
            name: line[name]
            for name in line
            if name.startswith(("critic/", "actor/", "turns/mean", "response"))
        }
        for line in read_metrics(run / "metrics.jsonl")
        if line["step"]
    ]
    return found, kept


@pytest.mark.slow  # test_picture_runs has a short one
@pytest.mark.parametrize("program", ["openai", "curl"])
def test_a_program_trains_the_weights_of_the_environment_that_it_mirrors(inputs, tmp_path, program):
    if program == "curl" and not (shutil.which("curl") and shutil.which("jq")):
        pytest.skip("curl and jq are not installed")
    native = _trained(inputs, tmp_path / "native")
    assert native[1][-1]["turns/mean"] > 1
    assert _trained(inputs, tmp_path / "agent", program=program) == native
