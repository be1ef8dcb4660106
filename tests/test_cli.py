from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import strop
from strop.cli.completion import _Keys
from strop.cli.main import _COMMANDS, main
from strop.config.recipes import RECIPES
from strop.errors import TrainingError
from strop.trainer.evaluation import default_folder, settings

from messages import Message, mentions
from runs import make_inputs, overrides, train

NO_TORCH = """
import sys
from strop.cli.main import main
try:
    status = main({arguments!r})
except SystemExit as end:
    status = end.code
heavy = [name for name in ("torch", "transformers", "ray") if name in sys.modules]
print("status", status, "imported", heavy)
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = make_inputs(tmp_path_factory.mktemp("inputs"))
    train(overrides(folder, folder / "run", "trainer.save_freq=2", "trainer.test_freq=1"))
    return folder


@pytest.mark.parametrize("command", ["train", "sft", "train-rm", "dpo"])
def test_help_of_runs_reads_no_schema(command):
    code = NO_TORCH.replace("torch", "omegaconf").replace("transformers", "pydantic").replace("ray", "yaml")
    code = code.format(arguments=[command, "--help"])
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert mentions(printed, f"strop {command} MODEL ", "--lr X", "status 0 imported []")
    assert command != "train" or mentions(printed, "--reward FILE[:NAME]", *RECIPES)


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["prepare", "--help"], ["nonsense"]])
def test_help_imports_no_torch(arguments):
    run = subprocess.run(
        [sys.executable, "-c", NO_TORCH.format(arguments=arguments)], capture_output=True, text=True
    )
    expected = 2 if arguments == ["nonsense"] else 0
    assert f"status {expected} imported []" in run.stdout, run.stdout + run.stderr


def test_check_prints_the_plan_and_the_resolved_configuration_without_torch(inputs):
    arguments = ["check", "--config-only", "--full", *overrides(inputs, inputs / "unused")]
    run = subprocess.run(
        [sys.executable, "-c", NO_TORCH.format(arguments=arguments)], capture_output=True, text=True
    )
    assert "status 0" in run.stdout, run.stderr
    assert "torch" not in run.stdout.splitlines()[-1]
    for text in (
        "16",
        "iterations",
        "optimizer steps",
        "  train_batch_size: 8  # override",
        "    entropy_coeff: 0.001  # default",
        "    prompt_length: 8  # follows data.max_prompt_length",
        "    ppo_mini_batch_size: 4  # override",
        "tokens each",
    ):
        assert text in run.stdout, run.stdout
    assert not (inputs / "unused").exists()


def test_check_reports_all_errors_of_a_stage_at_once(inputs, tmp_path, capsys):
    def check(*wrong):
        assert main(["check", *overrides(inputs, inputs / "unused", *wrong)]) == 2
        return "".join(capsys.readouterr())

    values = ("actor_rollout_ref.actor.ppo_mini_batch_size=3", "algorithm.adv_estimator=gea")
    assert mentions(check("trainer.sed=1", "data.train_batch_size=x"), "trainer.sed", "data.train_batch_size")
    assert mentions(check(*values), "2 errors", "ppo_mini_batch_size=3", "=8", "nearest: 2, 4", "gea")
    (tmp_path / "empty.parquet").touch()
    files = [f"data.{key}={tmp_path}/empty.parquet" for key in ("train_files", "val_files")]
    printed = check(*files, "reward_model.reward_kwargs.kind=1", "trainer.total_training_steps=1")
    assert mentions(printed, "'kind'")
    assert printed.count("empty.parquet:") == 1  # the same file twice


def test_errors_of_the_configuration_and_the_data_come_together_and_without_torch(inputs, tmp_path):
    (tmp_path / "sums.csv").write_text("question;answer\n1+1=;2\n")
    own = [f"data.{key}={tmp_path}/sums.csv" for key in ("train_files", "val_files")]
    arguments = ["train", *overrides(inputs, tmp_path / "run", *own, "algorithm.adv_estimator=grop")]
    run = subprocess.run(
        [sys.executable, "-c", NO_TORCH.format(arguments=arguments)], capture_output=True, text=True
    )
    assert "status 2 imported []" in run.stdout, run.stdout + run.stderr
    lines = run.stderr.splitlines()[1:]
    assert lines == [
        Message("ConfigError", "did you mean grpo?"),
        Message("ConfigError", "data.train_batch_size=8", "1 training rows"),
        Message("DataError", "sums.csv", "set data.prompt_key=question data.answer_key=answer"),
    ]


def test_own_data_needs_no_batch_sizes_and_no_validation_files(inputs, tmp_path, caplog):
    rows = "".join(f"{a}+1=;{a + 1}\n" for a in range(10))
    (tmp_path / "sums.csv").write_text("question;answer\n" + rows)
    (tmp_path / "reward.py").write_text(
        "def compute_score(response, answer):\n    return answer in response\n"
    )
    with caplog.at_level("INFO", "strop"):
        status = main([
            "train", f"{inputs}/model", "--n", "2", "data.prompt_key=question", f"{tmp_path}/sums.csv",
            "data.answer_key=answer", f"data.cache_dir={inputs}/cache", "--reward", f"{tmp_path}/reward.py",
            "actor_rollout_ref.rollout.name=hf", "data.max_prompt_length=8", "data.max_response_length=4",
            "trainer.device=cpu", "--steps", "2", "--out", f"{tmp_path}/run", "trainer.log_rollouts=False",
        ])  # fmt: skip
    assert status == 0
    assert "data.train_batch_size=10: the default of 32 is more than the 10 training rows" in caplog.messages
    assert "no validation: data.val_files is not set" in caplog.messages
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [(step["step"], step["episode"]) for step in steps] == [(1, 10), (2, 20)]
    assert not any(name.startswith("val/test_score") for step in steps for name in step)
    assert not (tmp_path / "run/validation").exists()


def test_check_builds_what_a_run_builds(inputs, capsys):
    assert main(["check", *overrides(inputs, inputs / "unused")]) == 0
    verdict, *lines = capsys.readouterr().out.splitlines()
    assert verdict.startswith("no errors")
    assert len(lines) < 24
    assert not (inputs / "unused").exists()


def test_check_says_what_a_run_will_do_in_few_lines(inputs, capsys):
    options = overrides(inputs, inputs / "unused", "algorithm.adv_estimator=grpo")
    assert main(["check", "--config-only", *options]) == 0
    verdict, *lines = capsys.readouterr().out.splitlines()
    words = dict(line.split(maxsplit=1) for line in lines if not line.startswith("warning"))
    assert verdict.startswith("no errors")
    assert "configuration alone" in verdict
    assert words.keys() == {"model", "data", "steps", "batch", "memory", "run"}
    assert mentions(words["model"], str(inputs / "model"), "grpo")
    assert mentions(words["data"], "train.parquet: 24 rows", "val.parquet")
    assert mentions(words["batch"], "16 samples = 8 prompts x 2")


def test_strop_alone_shows_its_help(capsys):
    assert main([]) == 0
    assert mentions(capsys.readouterr().out, "usage: strop", "train-rm", "examples:")


def test_the_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, f"strop {strop.__version__}\n")


@pytest.mark.parametrize("command", _COMMANDS)
def test_every_help_has_examples(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert mentions(capsys.readouterr().out, "examples:", f"strop {command} ")


def test_something_is_printed_before_slow_imports(inputs):
    code = f"""
import sys, strop.cli.main
own = sys.stderr.write
def write(text):
    own(text + str([name for name in ("torch", "pydantic") if name in sys.modules]))
    sys.exit(7)
sys.stderr.write = write
strop.cli.main.main(['train', *{overrides(inputs, inputs / "unused")!r}])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 7
    assert run.stderr.startswith("strop ")
    assert run.stderr.endswith("train is starting\n[]")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("lr", "actor_rollout_ref.actor.optim.lr"),
        ("optim.lr", "actor_rollout_ref.actor.optim"),
        ("n", "actor_rollout_ref.rollout.n"),
        ("ppo_mini_batchsize", "actor_rollout_ref.actor.ppo_mini_batch_size"),
        ("model.path", "actor_rollout_ref.model"),
        ("kl_coef", "algorithm.kl_ctrl.kl_coef"),
        ("critic.lr", "critic.optim.lr"),
        ("trainer.lr", "actor_rollout_ref.actor.optim.lr"),
        ("steps", "trainer.total_training_steps"),
        ("trainer.max_steps", "trainer.total_training_steps"),
        ("out", "trainer.default_local_dir"),
        ("model", "actor_rollout_ref.model.path"),
        ("reward", "custom_reward_function.path"),
        ("learning_rate", "actor_rollout_ref.actor.optim.lr"),
        ("num_generations", "actor_rollout_ref.rollout.n"),
    ],
)
def test_an_unknown_key_is_first_looked_for_in_the_actor(typed, meant, capsys):
    assert main(["check", "--config-only", f"{typed}=1"]) == 2
    assert f"did you mean {meant}" in capsys.readouterr().err


def test_check_names_the_command_whose_keys_are_given(capsys):
    assert main(["check", "model.path=m", "data.train_files=t.parquet"]) == 2
    assert mentions(capsys.readouterr().err, "strop sft, train-rm, dpo", "--command sft")
    assert main(["check", "model.path=m", "critic.optim.lr=1"]) == 2  # no command has both
    assert "--command" not in capsys.readouterr().err


def test_models_of_one_name_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for run in ("runs/a", "runs/b"):
        (tmp_path / run / "final_model").mkdir(parents=True)
    named = [
        "runs/a/final_model",
        "runs/b/final_model",
        "Qwen/Qwen2.5-0.5B",
        "Qwen/Qwen2.5-0.6B",
        "hdfs://n/x",
    ]
    folders = [str(default_folder(model)) for model in named]
    assert folders == [f"evaluations/{model.replace('://', '/')}" for model in named]
    assert default_folder(str(tmp_path / "runs/../runs/a/final_model/")) == Path(folders[0])


def test_a_second_evaluation_gets_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    Path("evaluations/model").mkdir(parents=True)
    Path("evaluations/model-2").mkdir()
    assert settings("model", ())["trainer"]["default_local_dir"] == "evaluations/model-3"
    assert (
        settings("model", (), out="evaluations/model")["trainer"]["default_local_dir"] == "evaluations/model"
    )


def test_keys_words_and_files_are_completed(tmp_path, monkeypatch):
    keys = _Keys("train")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.csv").touch()
    assert "sums.csv" in keys("su")
    assert "data.train_files=" in keys("data.tr")
    assert keys("trainer.device=") == ["trainer.device=auto", "trainer.device=cpu", "trainer.device=cuda"]
    assert keys("trainer.val_only=") == ["trainer.val_only=True", "trainer.val_only=False"]
    assert "algorithm.adv_estimator=rloo" in keys("algorithm.adv_estimator=r")
    assert "update.loss=simpo" in _Keys("dpo")("update.loss=")
    assert "model.path=" in _Keys("sft")("")


def test_the_shell_gets_completions(tmp_path):
    pytest.importorskip("argcomplete")
    line = "strop train trainer.dev"
    shell = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    shell |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "answer"), "_ARGCOMPLETE_SHELL": "bash"}
    run = subprocess.run([sys.executable, "-m", "strop"], env={**os.environ, **shell}, capture_output=True)
    assert (tmp_path / "answer").read_text().split() == ["trainer.device="], run.stderr


def test_prepare_and_score_go_together(tmp_path, capsys):
    assert (
        main(["prepare", "arithmetic", "--max-operand", "4", "--held-out", "5", "--out", str(tmp_path)]) == 0
    )
    assert "train: 20 rows" in capsys.readouterr().out
    arguments = ["score", str(tmp_path / "test.parquet"), "--response-column", "reward_model.ground_truth"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "strop/arithmetic" in printed
    assert "1.0000" in printed


def test_export_and_view_read_a_run(inputs, tmp_path, capsys):
    checkpoint = inputs / "run" / "global_step_2"
    assert main(["export", str(checkpoint), "--out", str(tmp_path / "model")]) == 0
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert main(["view", str(inputs / "run")]) == 0
    assert "critic/score/mean" in capsys.readouterr().out
    assert main(["export", str(inputs), "--out", str(tmp_path / "other")]) == 2
    assert main(["view", str(tmp_path / "model")]) == 2


def test_options_and_overrides_come_in_any_order(inputs, tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("algorithm: {adv_estimator: gea}\n")
    options = overrides(inputs, tmp_path / "run")
    assert main(["train", *options[:3], f"--config-path={tmp_path}", *options[3:], "--config-name=mine"]) == 2
    assert "gea" in capsys.readouterr().err


@pytest.mark.parametrize("saved", [False, True])
def test_ctrl_c_mentions_the_checkpoint_if_there_is_one(inputs, tmp_path, monkeypatch, capsys, saved):
    def stop(_config, **_given):
        raise KeyboardInterrupt

    monkeypatch.setattr("strop.trainer.commands.train_once", stop)
    if saved:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("7\n")
    said = "at step 7, saved; the same command goes on" if saved else "after step 0; nothing is saved"
    assert main(["train", *overrides(inputs, tmp_path)]) == 130
    assert capsys.readouterr().err.endswith(f"Ctrl-C: stopped {said}\n")


def test_an_error_of_a_validation_names_the_checkpoint_of_its_update(inputs, tmp_path, monkeypatch, capsys):
    def fail(_config, **_given):
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("1\n")  # of which no metrics are logged
        raise TrainingError("no validation")

    monkeypatch.setattr("strop.trainer.commands.train_once", fail)
    assert main(["train", *overrides(inputs, tmp_path)]) == 2
    assert mentions(capsys.readouterr().err, "at step 1, saved", f"{tmp_path / 'global_step_1'} goes on")


_ANSWER = '{"data_source": "openai/gsm8k", "response": "#### 3", "ground_truth": "3"}\n'


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["score", "deep.jsonl"], "deep.jsonl, line 1: not JSON"),
        (["score", "digits.jsonl"], "digits.jsonl, line 1: not JSON"),
        (["score", "~nobody-here/answers.jsonl"], "~nobody-here/answers.jsonl"),
        (["score", "answers.jsonl", "--workers", "100000"], "--workers 100000: .*at most 1024"),
        (["score", "answers.jsonl", "--timeout", "nan"], "--timeout nan"),
        (["view", "~nobody-here/run"], "~nobody-here/run"),
        (["view", "run", "--metrics", "*"], r"metrics.jsonl, line 1: expected a JSON object of numbers"),
        (["export", "~nobody-here/global_step_1", "--out", "model"], "~nobody-here/global_step_1"),
        (["export", "global_step_1", "--out", "model"], "global_step_1"),
        (["export", "global_step_1", "--out", "s3://bucket/model"], "s3://bucket/model"),
        (["prepare", "gsm8k", "--source", "~nobody-here/gsm8k", "--out", "made"], "~nobody-here/gsm8k"),
        (["prepare", "gsm8k", "--source", "surrogate", "--out", "made"], "lone surrogate"),
        (["prepare", "arithmetic", "--out", "s3://bucket/made"], "s3://bucket/made"),
        (["prepare", "arithmetic", "--out", "made", "--held-out", "nan"], "held_out=nan"),
        (["prepare", "arithmetic", "--out", "made", "--held-out", "inf"], "held_out=inf"),
        (["prepare", "arithmetic", "--out", "made", "--seed=-1"], "seed=-1"),
        (["prepare", "arithmetic", "--out", "made", "--max-operand", "9" * 30], "max_operand=999"),
        (["check", "--config-path", "~nobody-here/own.yaml"], "~nobody-here/own.yaml"),
    ],
)
def test_broken_files_and_arguments_end_with_status_2_and_a_message(
    tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    for folder in ("run", "global_step_1", "surrogate"):
        (tmp_path / folder).mkdir()
    (tmp_path / "answers.jsonl").write_text(_ANSWER)
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    (tmp_path / "digits.jsonl").write_text(_ANSWER.replace('"3"', "1" * 5000))
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "lr": "\\u001b[31m"}\n{"step": 2}\n')
    (tmp_path / "global_step_1" / "manifest.json").write_text("[" * 100_000)
    record = r'{"question": "\ud800", "answer": "#### 3"}'
    (tmp_path / "surrogate" / "train.jsonl").write_text(record)
    assert main(arguments) == 2
    printed = capsys.readouterr().err.replace("\n", " ")
    assert re.search(message, printed), printed


def test_the_package_is_the_command_too():
    run = subprocess.run([sys.executable, "-m", "strop", "--version"], capture_output=True, text=True)
    assert run.stdout.split()[0] == "strop", run.stderr


def test_texts_are_shown_in_any_locale():
    """The terminal of a Latin-1 locale has no sparklines; files of the package are UTF-8 in any."""
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}
    for arguments in (["docs", "view"], ["docs"]):
        run = subprocess.run(
            [sys.executable, "-m", "strop", *arguments], capture_output=True, env=environment
        )
        assert run.returncode == 0, run.stderr
