"""strop as functions: what they train, what they leave behind, and the notebook of the examples."""

from __future__ import annotations

import fcntl
import gc
import json
import logging
import os
import pydoc
import random
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from small_disk import no_room
from transformers import AutoModelForCausalLM

import strop
from strop.algorithms.policy_loss import PolicyLoss
from strop.api import _Given
from strop.checkpoint.folder import verify
from strop.config.names import needs_critic
from strop.data.sources import Rows
from strop.data.sources import fingerprint as rows_fingerprint
from strop.errors import ConfigError, DataError, SeveralErrors
from strop.models.loader import load_tokenizer
from strop.passed import PASSED, passing
from strop.protocol import DataProto
from strop.rewards.identity import fingerprint
from strop.session import in_python, session
from strop.tracking.base import RunInfo
from strop.tracking.console import NotebookTable
from strop.tracking.jsonl import JsonlTracker

import forked
import runs
import tiny_model
from messages import mentions, naming

EXAMPLES = Path(__file__).parents[1] / "examples"
ANSWERED = {"train_files": [{"prompt": "1+1=", "response": "2"}] * 4, "max_prompt_length": 8}
APART = {
    "trainer.async_steps": 1,
    "trainer.resource_pools": {"learner": [1], "rollout": [1]},
    "trainer.placement": {"Rollout": "rollout"},
    "actor_rollout_ref.hybrid_engine": False,
}
ROWS = [{"question": f"{i % 10}+{i // 10}=", "answer": i % 10 + i // 10} for i in range(24)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model.save(tmp_path_factory.mktemp("api") / "model", hidden=32)


def train(model, folder, reward, **more):
    section = {"prompt_key": "question", "max_prompt_length": 8, "max_response_length": 4}
    return strop.train(
        model,
        {"train_files": ROWS, "train_batch_size": 8, **section},
        reward,
        actor_rollout_ref={"rollout": {"name": "hf", "n": 2}},
        trainer={"total_training_steps": 1, "default_local_dir": folder, "device": "cpu"},
        **more,
    )


def state():
    return {
        "generators": (random.getstate(), torch.get_rng_state().tolist()),
        "handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "dtype": torch.get_default_dtype(),
        "log": list(logging.getLogger("strop").handlers),
    }


def running():
    children = psutil.Process().children(recursive=True)
    return set(threading.enumerate()) | {("process", child.pid) for child in children}


def test_a_function_trains_to_the_weights_of_the_command(model, tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    (tmp_path / "reward.py").write_text(
        "def digits(response, answer):\n    return response.count(str(answer))\n"
    )
    factor = 1.0
    with runs.undrawn(), torch.no_grad():  # a notebook may have turned gradients off
        train(model, tmp_path / "function", lambda response, answer: factor * response.count(str(answer)))
        assert not torch.is_grad_enabled()
    done = forked.run(
        _command,
        [
            f"actor_rollout_ref.model.path={model}",
            *(f"data.{split}_files={tmp_path / 'rows.parquet'}" for split in ("train", "val")),
            *("data.prompt_key=question", "data.max_prompt_length=8", "data.max_response_length=4"),
            *("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"),
            *("actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.n=2"),
            *("trainer.test_freq=-1", "trainer.val_before_train=False", "algorithm.adv_estimator=grpo"),
            "algorithm.kl_ctrl.kl_coef=0",
            *("trainer.total_training_steps=1", "trainer.device=cpu"),
            *(f"custom_reward_function.path={tmp_path / 'reward.py'}", "custom_reward_function.name=digits"),
            f"trainer.default_local_dir={tmp_path / 'command'}",
        ],
    )
    assert done.returncode == 0, done.stderr
    ours, theirs = (
        (tmp_path / name / "final_model" / "model.safetensors").read_bytes()
        for name in ("function", "command")
    )
    assert ours == theirs


def _command(options):
    from strop.cli.main import main

    with runs.undrawn():
        sys.exit(main(["train", "--recipe", "grpo", *options]))


def test_an_interrupt_leaves_nothing_behind_and_the_next_run_works(model, tmp_path, monkeypatch):
    def longer(completions, **columns):
        assert set(columns) >= {"question", "answer"}
        return [len(text) / 4 for text in completions]

    def zero(response):
        return 0.0

    before, running_before = state(), running()
    log = JsonlTracker.log
    monkeypatch.setattr(JsonlTracker, "log", lambda *args: (os.kill(os.getpid(), signal.SIGINT), log(*args)))
    with runs.undrawn():
        with pytest.raises(KeyboardInterrupt):
            train(model, tmp_path / "run", [longer, zero])
        assert state() == before
        # What an earlier test left may end meanwhile.
        assert running() <= running_before
        monkeypatch.setattr(JsonlTracker, "log", log)
        run = train(model, tmp_path / "run", [longer, zero])
    assert state() == before
    assert running() <= running_before
    assert [step["step"] for step in run.read_metrics()] == [1]
    samples = pq.read_table(run.folder / "rollouts" / "step_000001.parquet").to_pylist()
    assert [row["score"] for row in samples] == [row["reward/longer"] for row in samples]
    assert {row["reward/zero"] for row in samples} == {0.0}
    assert len(run.samples) == len(samples) == 16
    assert run.model_path == run.folder / "final_model"
    assert run.model()[0].config.vocab_size == len(run.model()[1])
    with pytest.raises(DataError, match="step 5"):
        run.samples_of(5)


def test_a_program_that_is_ended_says_where_its_run_stands(caplog):
    def ended() -> None:
        with session("train"):
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except KeyboardInterrupt as interrupt:
                interrupt.add_note("stopped at step 2, saved")
                raise

    with pytest.raises(SystemExit, match="143"):
        ended()
    assert caplog.messages[-1] == "stopped at step 2, saved"


def test_the_notebook_of_the_examples_trains_a_model_that_knows_some_answers(tmp_path):
    done = forked.run(_notebook, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


def _notebook(folder):
    os.chdir(folder)
    tokenizer = tiny_model.build_tokenizer(tiny_model.CHARACTERS + "Whatis?")
    tiny_model.build_model(tokenizer).save_pretrained("tiny")
    tokenizer.save_pretrained("tiny")
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    settings, data, *rest = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names = {"__name__": "__main__"}
    exec(settings, names)
    exec(data, names)
    known = [{"prompt": row["prompt"], "response": row["answer"]} for row in names["train"]]
    warmed_up = strop.sft(
        "tiny",
        known,
        lr=3e-3,
        steps=60,
        out="sft",
        **{"data.max_response_length": 8, "data.max_prompt_length": 64},
    )
    names |= {"MODEL": str(warmed_up.model_path), "STEPS": 12}
    for cell in rest:
        exec(cell, names)
    rewards = names["run"].metrics["critic/score/mean"]
    assert sum(rewards[-3:]) > sum(rewards[:3]) > 0
    assert names["run"]._repr_png_()


def test_overrides_are_sections_or_whole_keys_over_the_file(tmp_path):
    (tmp_path / "own.yaml").write_text("trainer: {save_freq: 7, test_freq: 9}\ndata: {train_batch_size: 4}\n")
    given = _Given("train", tmp_path / "own.yaml", {"trainer.save_freq": 3, "trainer": {"total_epochs": 2}})
    assert given.data({"train_files": Path("t.jsonl"), "val_files": ROWS, "prompt_key": "question"}) is None
    config = given.load({"data.train_batch_size": 24})
    trainer, data = config.trainer, config.data
    assert (trainer.save_freq, trainer.test_freq, trainer.total_epochs) == (3, 9, 2)
    assert (data.train_batch_size, data.prompt_key, data.train_files) == (4, "question", ["t.jsonl"])
    assert data.val_files == [str(given.rows[0])]


@pytest.mark.fast("more0-grpo-8-0", "more2-gae-1-0", "more7-gae-1-0")
@pytest.mark.parametrize(
    ("more", "estimator", "n", "critic_warmup"),
    [
        ({}, "grpo", 8, 0),
        ({"algorithm": "ppo", "steps": 100}, "gae", 1, 10),
        ({"algorithm": "ppo", "steps": 100, "recipe": "grpo"}, "gae", 1, 0),
        ({"algorithm": "ppo", "steps": 100, "recipe": None}, "gae", 1, 0),
        ({"algorithm": {"gamma": 0.9}}, "grpo", 8, 0),
        ({"algorithm": {"gamma": 0.9}, "config": "own.yaml"}, "rloo", 8, 0),
        ({"algorithm": "ppo", "config": "own.yaml", "steps": 8}, "gae", 1, 2),
        ({"algorithm.adv_estimator": "gae"}, "gae", 1, 0),
    ],
)
def test_the_recipe_is_that_of_the_algorithm_or_grpo(
    monkeypatch, tmp_path, more, estimator, n, critic_warmup
):
    found = []
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text("algorithm: {adv_estimator: rloo}\n")
    monkeypatch.setattr("strop.trainer.commands.train", lambda config, **_: found.append(config))
    strop.train("m", ROWS, len, **more)
    (config,) = found
    assert (config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n) == (estimator, n)
    assert config.trainer.critic_warmup == critic_warmup
    assert not config.data.val_files  # so there is no validation
    assert config.algorithm.gamma == (0.9 if isinstance(more.get("algorithm"), dict) else 1.0)


def test_short_names_set_the_keys_of_the_short_command(monkeypatch, tmp_path):
    found = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("strop.trainer.commands.train", lambda config, **_: found.append(config))
    strop.train("m", ROWS, len, lr=0.5, steps=7, n=5, out=tmp_path / "run")
    strop.dpo("m", ROWS, lr=0.25, steps=3, out="other")
    rl, dpo = found
    assert (rl.actor_rollout_ref.actor.optim.lr, rl.actor_rollout_ref.rollout.n) == (0.5, 5)
    assert (rl.trainer.total_training_steps, rl.trainer.default_local_dir) == (7, str(tmp_path / "run"))
    assert (dpo.update.optim.lr, dpo.trainer.total_training_steps) == (0.25, 3)
    assert dpo.trainer.default_local_dir == "other"


def test_a_model_object_is_saved_once_and_identifies_the_run(model, tmp_path):
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    loaded.generation_config.temperature = 0.7  # without do_sample save_pretrained refuses it
    tokenizer = load_tokenizer(model)
    keys = {"trainer.save_freq": 1}

    def call(steps):
        where = {"tokenizer": tokenizer, "trainer.total_training_steps": steps}
        return train(loaded, tmp_path / "run", lambda response: len(response), **where, **keys)

    with runs.undrawn():
        run = call(1)
        (saved,) = (run.folder / "model").iterdir()
        before = (saved / "model.safetensors").stat().st_mtime_ns
        assert json.loads((saved / "generation_config.json").read_text())["temperature"] == 0.7
        assert loaded.generation_config.temperature == 0.7
        assert len(call(2).read_metrics()) == 2
        assert (saved / "model.safetensors").stat().st_mtime_ns == before
        assert list((run.folder / "model").iterdir()) == [saved]
        with torch.no_grad():
            next(loaded.parameters()).mul_(2)
        with pytest.raises(ConfigError, match=naming("model: ", str(saved))):
            call(3)
    assert (saved / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(ConfigError, match=naming("model:", "tokenizer=NoneType")):
        strop.train(loaded, ROWS, len)
    with pytest.raises(ConfigError, match=naming("model:", "tokenizer=")):
        strop.train("m", ROWS, len, tokenizer=tokenizer)


def test_a_model_object_that_cannot_be_saved_leaves_no_part_of_it(model, tmp_path, monkeypatch):
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), load_tokenizer(model)
    monkeypatch.setattr("strop.trainer.run_folder._LOCK_WAIT_S", 0.0)
    saved = tmp_path / "run" / "model"
    saved.mkdir(parents=True)
    with (tmp_path / "run" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=naming(tmp_path / "run", "another run")):
            train(loaded, tmp_path / "run", len, tokenizer=tokenizer)
    monkeypatch.setattr(tokenizer, "save_pretrained", no_room)
    with pytest.raises(OSError, match="No space left"):
        train(loaded, tmp_path / "run", len, tokenizer=tokenizer)
    assert list(saved.iterdir()) == []


def test_metrics_are_columns_and_rows_with_and_without_pandas(tmp_path, monkeypatch):
    rows = [{"step": 1, "lr": 0.5}, {"step": 2, "lr": 0.25, "val/score": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    metrics = strop.Run(tmp_path).metrics
    assert metrics["lr"] == [0.5, 0.25]
    assert metrics["val/score"] == [None, 1.0]
    assert metrics[1:]["lr"] == [0.25]
    assert (metrics[-1], metrics[:1], len(metrics), list(metrics)) == (rows[1], rows[:1], 2, rows)
    assert metrics.to_pandas()["lr"].tolist() == [0.5, 0.25]
    assert "<table" in metrics._repr_html_()
    with pytest.raises(KeyError, match="val/score"):
        metrics["val/scor"]
    with pytest.raises(AttributeError, match=naming("tail", "to_pandas")):  # 0.1.0 returned data frames
        metrics.tail()
    monkeypatch.setattr("strop.results._has_pandas", lambda: False)
    assert (repr(metrics), metrics._repr_html_()) == (repr(rows), None)


def test_numbers_of_numpy_are_numbers():
    """As those of a sweep over ``np.logspace``, or of a column of a data frame."""
    keys = {"actor_rollout_ref.model.path": "m", "data.train_files": "f", "trainer.save_freq": np.int32(5)}
    config = _Given("train", None, {"lr": np.float64(1e-4), "n": np.int64(3), **keys}).load()
    policy = config.actor_rollout_ref
    assert (policy.actor.optim.lr, policy.rollout.n, config.trainer.save_freq) == (1e-4, 3, 5)


@pytest.mark.parametrize("async_steps", [0, pytest.param(1, marks=pytest.mark.slow)])  # 1: on Ray
def test_on_step_sees_the_metrics_and_stops_a_run_that_the_same_call_continues(model, tmp_path, async_steps):
    seen = []

    def stops(step, metrics):
        seen.append((step, metrics["critic/score/mean"]))
        return np.bool_(step < 2)  # of a comparison in numpy

    def call(on_step):
        keys = {"trainer.total_training_steps": 4, **(APART if async_steps else {})}
        return train(model, tmp_path / "run", lambda response: len(response), on_step=on_step, **keys)

    with runs.undrawn():
        run = call(stops)
        assert [step for step, _ in seen] == [1, 2]
        assert seen == [(row["step"], row["critic/score/mean"]) for row in run.read_metrics()]
        assert run.model_path == run.folder / "final_model"
        assert len(call(lambda step, metrics: None).read_metrics()) == 4
        with pytest.raises(ZeroDivisionError) as caught:
            strop.sft(model, ANSWERED, out=tmp_path / "sft", steps=2, on_step=lambda step, metrics: 1 / 0)
    assert not (tmp_path / "sft" / "final_model").exists()
    (note,) = caught.value.__notes__
    assert mentions(note, "stopped at step 1, saved", tmp_path / "sft" / "global_step_1")
    verify(tmp_path / "sft" / "global_step_1")


async def awaited(step, metrics): ...


class Awaited:
    async def __call__(self, step, metrics): ...


@pytest.mark.fast("5-of \\\\(step, metrics\\\\), found 5")
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda metrics: None, r"\(step, metrics\), found \(metrics\)"),
        (lambda: None, r"\(step, metrics\), found \(\)"),
        (5, "of \\(step, metrics\\), found 5"),
        (awaited, "an async one"),
        (Awaited(), "an async one"),
    ],
)
def test_on_step_that_no_iteration_could_call_is_refused_before_the_model_loads(
    model, tmp_path, function, words
):
    for call in (partial(strop.sft, model, ANSWERED), partial(strop.train, model, ANSWERED, len)):
        with pytest.raises(ConfigError, match=words):
            call(out=tmp_path / "run", steps=1, on_step=function)
    assert not (tmp_path / "run").exists()


def test_a_finished_run_is_no_answer_to_another_learning_rate(model, tmp_path):
    """As in a sweep over one folder; the same values, and others of ``trainer``, complete it again."""
    call = partial(strop.sft, model, ANSWERED, out=tmp_path, steps=1, **{"trainer.save_freq": 1})
    with runs.undrawn():
        first = call(lr=1e-3).read_metrics()
        with pytest.raises(ConfigError, match=r"(?s)nothing is left to train with.*lr.*0\.001 -> 0\.01"):
            call(lr=1e-2)
        assert call(lr=1e-3, **{"trainer.test_freq": 7}).read_metrics() == first


@pytest.mark.fast("0")
@pytest.mark.parametrize("async_steps", [0, 1])
def test_a_batch_is_freed_when_its_iteration_has_ended(model, tmp_path, async_steps):
    """Without the search for cycles, which comes late: on Ray a batch keeps its objects in the store."""
    live = []

    def count(step, metrics):
        live.append(sum(isinstance(found, DataProto) for found in gc.get_objects()))

    keys = {"trainer.total_training_steps": 9 if async_steps else 5, **(APART if async_steps else {})}
    with runs.undrawn():
        gc.disable()
        try:
            train(model, tmp_path, lambda response: len(response), on_step=count, **keys)
        finally:
            gc.enable()
    # another batch is in flight, of which more or fewer parts are made
    later = min(live[5:]) if async_steps else max(live[3:])
    assert later <= max(live[:3])


def centred(rewards, response_mask):
    """Subtract the batch's mean score."""
    score = rewards.sum(1, keepdim=True)
    advantages = (score - score.mean()) * response_mask
    return advantages, advantages


def test_functions_are_estimator_policy_loss_and_metric(model, tmp_path):
    factor = 2.0

    def reinforce(log_prob, advantages, response_mask):
        zero = torch.zeros_like(log_prob)
        loss = -(log_prob * advantages) * response_mask
        return PolicyLoss(loss, zero + 1, zero, zero, {"twice": factor * response_mask.float()})

    run = train(
        model,
        tmp_path / "run",
        lambda response: float(len(response)),
        algorithm=centred,
        **{"actor_rollout_ref.actor.policy_loss": reinforce},
    )
    (step,) = run.read_metrics()
    assert step["actor/twice"] == pytest.approx(2.0)
    assert step["actor/pg_clipfrac"] == 0
    config = yaml.safe_load((run.folder / "config.yaml").read_text())
    estimator = config["algorithm"]["adv_estimator"]
    assert estimator == f"function:centred-{fingerprint(centred)}"
    assert not PASSED
    with pytest.raises(ConfigError, match=naming("algorithm=", estimator, "program")):
        train(model, tmp_path / "other", lambda response: 0.0, algorithm=estimator)


def test_an_estimator_that_is_passed_has_the_inputs_that_it_requires():
    given = _Given("train", None, {}, "grpo")
    given.algorithm(centred)
    (name,) = given.functions
    with passing(given.functions):
        assert not needs_critic(name)
        assert given.load().algorithm.adv_estimator == name
    assert needs_critic(name)  # not known any more


GOOD = """\
rows = [{"question": "1+1", "answer": 2}]
strop.train("m", rows, len, "grpo", lr=1e-4, steps=10, n=4, out="runs/x")
strop.train("m", dict(train_files=rows, prompt_key="q"), trainer=dict(logger=["console"]), steps=1)
strop.train({"path": "m"}, ["a.csv"], actor_rollout_ref=dict(rollout=dict(n=2), actor={"optim": {"lr": 1}}))
strop.train(Path("m"), pa.table({"a": [1]}), [len], algorithm=dict(gamma=0.9))
strop.dpo("m", dict(train_files=Path("a.csv"), chosen_key="c"), update=dict(optim=dict(lr=3e-3)))
strop.evaluate("m", dict(val_files=rows), len, n=3, out="x").scores
"""
BAD = """\
strop.train("m", "d.csv", trainer=dict(totl_steps=1))
strop.train("m", {"train_files": "d.csv", "prompt_keyy": "q"})
strop.train("m", "d.csv", actor_rollout_ref=dict(rollout=dict(nn=2)))
strop.sft("m", "d.csv", trainer={"total_training_steps": "many"})
strop.train("m", "d.csv", lr="high")
"""


def test_a_type_checker_finds_misspelt_keys_and_wrong_types(tmp_path):
    file = tmp_path / "program.py"
    head = "from pathlib import Path\nimport pyarrow as pa\nimport strop\n"
    file.write_text(head + GOOD + BAD)
    ty = Path(sys.executable).with_name("ty")
    command = [ty, "check", "--python", sys.executable, "--output-format", "concise", file]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    lines = {int(line.split(":")[1]) for line in done.stdout.splitlines() if "error[" in line}
    first = len((head + GOOD).splitlines()) + 1
    assert lines == set(range(first, first + len(BAD.splitlines()))), done.stdout


@pytest.mark.parametrize("in_memory", [True, False])
def test_few_rows_are_one_batch_unless_somebody_sets_its_size(monkeypatch, tmp_path, in_memory):
    found = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("strop.trainer.commands.train", lambda config, **_: found.append(config))
    file = Path("rows.jsonl")
    file.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    rows = ROWS if in_memory else file
    strop.train("m", rows, len)
    strop.sft("m", rows)
    strop.train("m", {"train_files": rows, "train_batch_size": 64}, len)
    assert [config.data.train_batch_size for config in found] == [len(ROWS), len(ROWS), 64]
    assert found[0].actor_rollout_ref.actor.ppo_mini_batch_size == len(ROWS)


@pytest.mark.parametrize(
    ("arguments", "more", "parts"),
    [
        ((object(), ROWS, len), {}, ("model:", "object", "path")),
        (("m", ROWS, 3), {}, ("reward:", "found 3")),
        (("m", {"a": ["x"]}, len), {}, ("data.a", "unknown")),
        (("m", {"prompt": ["1+2="], "answer": ["3"]}, len), {}, ("data:", "a list with a dict")),
        (("m", ["1+2=", "2+3=", "3+4=", "4+5="], len), {}, ("4 texts", "{'prompt': '4+5='}")),
        (("m", (row for row in ROWS), len), {}, ("rows:train", "generator")),
        (("m", ROWS, len), {"trainer": {"total_stepz": 3}}, ("trainer.total_stepz", "unknown")),
        (("m", ROWS, len), {"learning_rate": 1e-5}, ("learning_rate", "did you mean lr")),
        (("m", ROWS, len), {"recipe": "grop"}, ("recipe grop", "grpo")),
        (("m", ROWS, len), {"trainer": {"seed": object()}}, ("trainer", "object")),
        (
            ("/nowhere/model", {"train_files": ROWS, "prompt_key": "question"}, lambda response: 0.0),
            {},
            ("model='/nowhere/model'", "no such folder"),
        ),
    ],
)
def test_wrong_arguments_are_errors_that_name_them(arguments, more, parts):
    with pytest.raises((ConfigError, DataError, SeveralErrors), match=naming(*parts)) as caught:
        strop.train(*arguments, **more)
    assert [Path(str(frame.path)).name for frame in caught.traceback] == ["test_api.py", "session.py"]


@pytest.mark.parametrize(
    ("text", "in_words"),
    [
        ("a: data.prompt_key=q: no column", "a: data=dict(prompt_key='q'): no column"),
        ("set trainer.save_freq, data.shuffle.", "set trainer=dict(save_freq=...), data=dict(shuffle=...)."),
        ("actor_rollout_ref.actor.optim.lr=1e-06; try algorithm.adv_estimator", "lr=1e-06; try algorithm"),
        ("(trainer.logger=[console, jsonl])", "(trainer=dict(logger=['console', 'jsonl']))"),
        ("trainer.default_local_dir=/a/b.c: in use", "out='/a/b.c': in use"),
        ("data.tokenizer=null. x.data.shuffle", "data=dict(tokenizer=None). x.data.shuffle"),
        ("critic.optim.lr=...", "critic=dict(optim=dict(lr=...))"),
        (
            "a.csv: set data.prompt_key=q data.answer_key=a",
            "a.csv: set data=dict(prompt_key='q', answer_key='a')",
        ),
        (
            "rows:train-1: found x; set data.prompt_key=q data.answer_key=a",
            "rows:train-1: found x; set data=dict(train_files=rows, prompt_key='q', answer_key='a')",
        ),
        ("eval:  strop eval R environment.path=a.py:A", "eval:  strop eval R environment.path=a.py:A"),
    ],
)
def test_messages_have_keys_as_python_writes_them(text, in_words):
    assert in_python(text, "train") == in_words


def test_warnings_have_keys_as_python_writes_them(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger("strop"), "propagate", False)  # to the handlers of pytest
    with session("train"):
        logging.getLogger("strop").warning("%s", "data.shuffle=False has no effect")
    assert "data=dict(shuffle=False) has" in capsys.readouterr().err


def test_names_of_rows_and_functions_follow_their_content():
    def scorer(factor):
        return lambda response: factor * len(response)

    assert fingerprint(scorer(1.0)) == fingerprint(scorer(1.0)) != fingerprint(scorer(2.0))
    digest, count = rows_fingerprint(Rows("a", ROWS))
    assert count == 24
    assert digest == rows_fingerprint(Rows("b", pa.Table.from_pylist(ROWS)))[0]
    assert digest != rows_fingerprint(Rows("a", ROWS[1:]))[0]


def test_the_table_of_a_notebook_is_replaced_in_place(monkeypatch, tmp_path):
    shown = []

    class Handle:
        def update(self, content, raw):
            shown.append(content)

    def display(content, raw, display_id):
        shown.append(content)
        return Handle()

    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    table = NotebookTable(RunInfo(tmp_path, "project", "<b>", {}, total_steps=4))
    table._drawn = 0.0
    table.log_progress("generate 3 of 8 samples")
    assert "generate 3 of 8 samples" in shown[-1]["text/plain"]
    table.log(1, {"critic/score/mean": 0.25})
    table.close()
    assert "&lt;b&gt;" in shown[-1]["text/html"]
    assert "0.25" in shown[-1]["text/plain"]
    assert "step 1/4" in shown[-1]["text/plain"]


def test_dir_and_help_show_the_functions():
    names = ["train", "distill", "sft", "train_rm", "dpo", "evaluate", "Run", "Evaluation"]
    assert set(names) <= set(dir(strop))
    assert "RayPPOTrainer" not in dir(strop)
    assert strop.__all__[: len(names)] == names
    assert "train_rm(" in pydoc.plain(pydoc.render_doc(strop))


def test_evaluate_takes_an_environment_and_tools(monkeypatch, tmp_path):
    from strop.trainer import evaluation

    class Own:
        def reset(self): ...

    found = []
    monkeypatch.chdir(tmp_path)  # runs in the current folder would be proposed in the place of the model
    monkeypatch.setattr(evaluation, "evaluate", lambda config, rows: found.append(config.environment))
    strop.evaluate("m", [{"prompt": "p"}], len, environment=Own, tools=[len])
    assert [name.rpartition("-")[0] for name in (*found[0].path.values(), *found[0].tools)] == [
        "function:Own",
        "function:len",
    ]


def test_wrong_environments_are_refused_in_words(monkeypatch, tmp_path):
    class Own:
        def reset(self): ...

    monkeypatch.chdir(tmp_path)
    for named, given in (
        ("max_turn: unknown key", {"path": Own, "max_turn": 3}),
        ("expected the class itself", Own()),
        ("object of Own: expected the class itself", {"a": Own, "b": Own()}),
    ):
        with pytest.raises(ConfigError, match=named):
            strop.train("m", [{"prompt": "p"}], len, environment=given)
