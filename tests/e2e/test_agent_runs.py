"""Agent programs that say what an environment says train the same weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import agent_programs
import pytest

import strop
from strop.tracking.jsonl import read_metrics

import lookup_task
import tiny_model
from runs import hashes, train, undrawn

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


def test_a_function_is_an_agent_of_train_distill_and_evaluate(tmp_path):
    def counts(question, answer, base_url):  # its process need not import this module
        import json
        import urllib.request

        body = json.dumps({"messages": [{"role": "user", "content": question}]}).encode()
        found = json.load(urllib.request.urlopen(f"{base_url}/chat/completions", body))
        said = found["choices"][0]["message"]["content"]
        return {"score": float(str(answer) in said), "letters": len(said)}

    models = [tiny_model.save(tmp_path / name, hidden=32, seed=seed) for seed, name in enumerate("ab")]
    rows = [{"question": f"{number}+1=", "answer": number + 1} for number in range(8)]
    data = {"prompt_key": "question", "max_prompt_length": 8, "max_response_length": 6}
    given = {**data, "train_files": rows, "train_batch_size": 8}
    more = {"actor_rollout_ref.rollout.name": "hf", "trainer.device": "cpu", "agent": counts}
    with undrawn():
        for name, train in (
            ("train", lambda **keys: strop.train(models[0], given, **keys)),
            ("distill", lambda **keys: strop.distill(*models, given, **keys)),
        ):
            run = train(steps=1, out=tmp_path / name, **more)
            (line,) = [line for line in read_metrics(run.folder / "metrics.jsonl") if line["step"]]
            assert line["agent/requests"] == line["agent/sessions"]
            assert ("teacher/kl" in line) == (name == "distill")
    found = strop.evaluate(models[0], {**data, "val_files": rows}, out=tmp_path / "evaluation", **more)
    assert set(found.samples["n_turns"]) == {1}
    assert set(found.scores) == {"rows"}
