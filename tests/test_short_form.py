"""``strop train MODEL DATA``: words and options of a command line, and errors about them."""

from __future__ import annotations

import argparse
import shlex

import pytest

from strop.cli import check
from strop.cli.main import main
from strop.cli.train import (
    add_config_arguments,
    add_distill_arguments,
    add_train_arguments,
    load_arguments,
    short_form,
)
from strop.config.trees import PPO, TREES
from strop.errors import ConfigError

from messages import Message, naming

MODEL = "actor_rollout_ref.model.path"
ARGUMENTS = {"train": add_train_arguments, "check": check.add_arguments, "distill": add_distill_arguments}


def parsed(line: str) -> tuple[argparse.Namespace, str]:
    command, *words = shlex.split(line)
    parser = argparse.ArgumentParser(prog=f"strop {command}")
    ARGUMENTS.get(command, add_config_arguments)(parser)
    arguments = parser.parse_intermixed_args(words)
    return arguments, arguments.command


def meaning(line: str):
    arguments, command = parsed(line)
    return short_form(TREES.get(command, PPO), arguments)


def problems(line: str, capsys) -> list[str]:
    assert main(shlex.split(line)) == 2
    return capsys.readouterr().err.splitlines()[1:]


BOTH = {MODEL: "m", "data.train_files": "d.csv"}


@pytest.mark.parametrize(
    ("line", "values", "recipe"),
    [
        ("train m d.csv", BOTH, "grpo"),
        ("train --n 2 m trainer.seed=3 d.csv", {**BOTH, "actor_rollout_ref.rollout.n": 2}, "grpo"),
        ("train m d.csv --algorithm ppo", {**BOTH, "algorithm.adv_estimator": "gae"}, "ppo"),
        ("train m d.csv --algorithm rloo", {**BOTH, "algorithm.adv_estimator": "rloo"}, "grpo"),
        ("train m d.csv --recipe ppo", BOTH, "ppo"),
        (
            "train m d.csv --recipe a.yaml --algorithm reinforce++",
            {**BOTH, "algorithm.adv_estimator": "reinforce_plus_plus"},
            "a.yaml",
        ),
        (f"train {MODEL}=m data.train_files=d.csv", {}, None),
        ("distill m t d.csv", {**BOTH, "teacher.model.path": "t"}, "distill"),
        ("distill m d.csv 'teacher.servers=[http://host:1]'", BOTH, "distill"),
        ("distill m d.csv 'teacher.by_source={a: {}}'", BOTH, "distill"),
        (f"train {MODEL}=m --steps 5", {"trainer.total_training_steps": 5}, None),
        ("train m 'data.train_files=[a,b]' ~trainer.seed", {MODEL: "m"}, "grpo"),
        ("train m '[a.csv, b.csv]'", {**BOTH, "data.train_files": ["a.csv", "b.csv"]}, "grpo"),
        (
            "train m d.csv --reward r.py",
            {**BOTH, "custom_reward_function.path": "r.py"},
            "grpo",
        ),
        (
            "train m d.csv --reward a/r.py:mine",
            {**BOTH, "custom_reward_function.path": "a/r.py", "custom_reward_function.name": "mine"},
            "grpo",
        ),
        (
            "train m d.csv --reward r.py:Mine.score",  # an error names what the file has
            {**BOTH, "custom_reward_function.path": "r.py", "custom_reward_function.name": "Mine.score"},
            "grpo",
        ),
        (
            "train m d.csv --reward models/rm",
            {**BOTH, "reward_model.enable": True, "reward_model.model.path": "models/rm"},
            "grpo",
        ),
        (
            "sft m d.csv --lr 1e-5 --out runs/a",
            {
                "model.path": "m",
                "data.train_files": "d.csv",
                "update.optim.lr": 1e-5,
                "trainer.default_local_dir": "runs/a",
            },
            None,
        ),
        ("check m d.csv", BOTH, "grpo"),
        ("check --command dpo m d.csv", {"model.path": "m", "data.train_files": "d.csv"}, None),
    ],
)
def test_words_and_options_are_keys_over_a_recipe(line, values, recipe):
    assert meaning(line)[:2] == (values, recipe)


@pytest.mark.parametrize(
    ("reward", "meant"),
    [
        ("r", "did you mean r.py?"),
        ("mine.r:score", "did you mean mine/r.py:score?"),
        ("mine.r.score", "did you mean mine/r.py:score?"),
        ("sums.csv", "FILE.py"),
    ],
)
def test_a_reward_that_is_neither_a_file_nor_a_model_is_told_what_to_write(
    reward, meant, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for name in ("r.py", "mine/r.py", "sums.csv"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=naming(repr(reward), "FILE.py:NAME", "OWNER/NAME", meant)):
        meaning(f"train m d.csv --reward {reward}")


def test_a_folder_with_an_equals_sign_is_a_word(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=3").mkdir()
    assert meaning("train lr=3 d.csv")[0] == {MODEL: "lr=3", "data.train_files": "d.csv"}


@pytest.mark.parametrize(
    "url",
    ["https://hub.example/x/y/train.parquet?download=true", "s3://bucket/date=2026-01-01/train.parquet"],
)
def test_a_url_with_an_equals_sign_is_a_word(url):
    assert meaning(f"train m {url}")[0] == {MODEL: "m", "data.train_files": url}
    assert meaning(f"train m data.train_files={url}")[0] == {MODEL: "m"}


def test_a_file_lies_below_the_options(tmp_path):
    (tmp_path / "mine.yaml").write_text("trainer: {seed: 4, total_training_steps: 7}\n")
    line = f"train m d.csv --config {tmp_path}/mine.yaml --steps 5 --lr 1e-5 trainer.save_freq=3"
    arguments, _ = parsed(line)
    (config, _, _), _ = load_arguments(PPO, arguments)
    trainer = config.trainer
    assert (trainer.seed, trainer.total_training_steps, trainer.save_freq) == (4, 5, 3)
    assert (config.actor_rollout_ref.actor.optim.lr, config.algorithm.adv_estimator) == (1e-5, "grpo")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train me/m", [Message("DATA: not set", "for example data/train.parquet")]),
        ("train m a b", [Message("m a b", "strop train m data.train_files=[a,b]")]),
        ("train --model x --data y", [Message("write strop train x y")]),
        ("sft --model=x", [Message("write strop sft x DATA")]),
        (f"train m d {MODEL}=n", [Message("MODEL", f"{MODEL}=...", "twice")]),
        (f"train m d --lr 1 +{PPO.short['lr']}=2", [Message("--lr", PPO.short["lr"], "twice")]),
        ("train m d --batch-size 8", [Message("--batch_size", "data.train_batch_size")]),
        ("train m d --stesp 8", [Message("--stesp", "did you mean --steps?")]),
        ("train m d --num-generations=8", [Message("--num_generations", "did you mean --n?")]),
        ("train m d trainer.seed = 8", [Message("space", "key=value")]),
        ("train m d trainer.seed= 8", [Message("space", "key=value")]),
        ("train m d beta=0 seed=8", [Message("kl_loss_coef"), Message("mean trainer.seed?")]),
        ("train m d --trainer.save-freq 8", [Message("write trainer.save_freq=")]),
        ("check m d update.loss=simpo", [Message("update", "unknown key"), Message("--command dpo")]),
        ("check --command sft m d --n 3", [Message("--n", "strop sft")]),
        ("train m d --n 0 trainer.lr=3", [Message("trainer.lr", "--lr"), Message("--n: found 0")]),
        ("train --config no.yaml", [Message("no.yaml", "no such file")]),
        ("train m d --recipe no", [Message("recipe no", "grpo, ppo")]),
    ],
)
def test_wrong_arguments_are_answered_in_the_words_of_the_command_line(line, expected, capsys):
    assert problems(line, capsys) == expected


@pytest.mark.parametrize("command", ["train", "dpo", "check"])
def test_no_arguments_name_both_forms_the_short_one_first(command, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([command])
    printed = capsys.readouterr().err
    assert 0 < printed.index(f"strop {command} MODEL DATA") < printed.index(f"strop {command} key=value")
