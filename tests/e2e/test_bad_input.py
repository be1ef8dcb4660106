"""Each mistake is one clear line on standard error, without a traceback, and exit status 2."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strop.models.loader import load_scorer
from strop.trainer.main_ppo import main

import tiny_model
from runs import make_inputs, overrides


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = make_inputs(tmp_path_factory.mktemp("inputs"))
    empty = pq.read_table(folder / "train.parquet").slice(0, 0)
    pq.write_table(empty, folder / "empty.parquet")
    rows = pq.read_table(folder / "train.parquet").to_pylist()
    pq.write_table(
        pa.Table.from_pylist(rows).rename_columns(["s", "question", "a", "r", "e"]), folder / "no.parquet"
    )
    rows[3]["prompt"][0]["content"] = "1+" * 20
    pq.write_table(pa.Table.from_pylist(rows), folder / "long.parquet")
    pq.write_table(
        pa.Table.from_pylist([{**row, "data_source": "someone/elses"} for row in rows]),
        folder / "source.parquet",
    )
    pq.write_table(
        pa.Table.from_pylist([{"prompt": row["prompt"]} for row in rows]), folder / "unnamed.parquet"
    )
    pq.write_table(pa.Table.from_pylist(rows).drop_columns(["reward_model"]), folder / "no_target.parquet")
    no_answer = [dict(row) for row in rows]
    no_answer[5]["reward_model"] = {"style": "rule", "ground_truth": None}
    pq.write_table(pa.Table.from_pylist(no_answer), folder / "no_answer.parquet")
    (folder / "reward.py").write_text(
        "def other(data_source, solution_str, ground_truth, extra_info=None): return 1\n"
    )
    (folder / "nan.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return float('nan')\n"
    )
    (folder / "torn" / "actor").mkdir(parents=True)
    # a reward model over another vocabulary
    tokenizer = tiny_model.build_tokenizer("0123456789")
    tiny_model.build_model(tokenizer, hidden=32).save_pretrained(folder / "small")
    load_scorer(folder / "small", fresh_head_seed=1).save_pretrained(folder / "reward_model")
    tokenizer.save_pretrained(folder / "reward_model")
    return folder


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (["data.train_files={}/nothing.parquet"], ["no file", "nothing.parquet"]),
        (["data.train_files={}/empty.parquet"], ["empty.parquet", "no rows"]),
        (["data.train_files={}/no.parquet"], ["no.parquet", "prompt"]),
        (
            ["data.train_files={}/long.parquet", "data.filter_overlong_prompts=false"],
            ["long.parquet, row 3", "max_prompt_length is 8"],
        ),
        (["data.train_files={}/source.parquet"], ["someone/elses", "openai/gsm8k", "custom_reward_function"]),
        (["data.train_batch_size=100"], ["24", "100"]),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=3"], ["3", "8", "nearest"]),
        (["algorithm.adv_estimator=gea"], ["gea", "gae", "grpo"]),
        (["trainer.totl_epochs=3"], ["trainer.totl_epochs", "trainer.total_epochs"]),
        (["custom_reward_function.path={}/reward.py"], ["compute_score", "other"]),
        (["custom_reward_function.path={}/nothing.py"], ["nothing.py"]),
        (["custom_reward_function.path={}/nan.py"], ["score=nan"]),
        (["trainer.resume_mode={}/nothing"], ["nothing"]),
        (["trainer.resume_mode={}/torn"], ["torn", "not a whole checkpoint"]),
        (
            [
                "reward_model.enable=true",
                "reward_model.model.path={}/reward_model",
                "reward_model.model.input_tokenizer=null",
            ],
            ["19 tokens of", "/model", "14 of", "/reward_model", "input_tokenizer"],
        ),
        (["actor_rollout_ref.model.path={}/nothing"], ["nothing"]),
        (["actor_rollout_ref.model.path=no-such-owner/no-such-model"], ["no-such-owner/no-such-model"]),
        (["trainer.device=cuda"], ["trainer.device=cuda", "no GPU"]),
        (["trainer.critic_warmup=2"], ["critic_warmup=2", "all 2 iterations"]),
        (
            ["trainer.total_training_steps=null", "trainer.total_epochs=1", "trainer.critic_warmup=9"],
            ["critic_warmup=9", "all 3 iterations"],
        ),
        (
            ["actor_rollout_ref.actor.policy_loss=cispo", "actor_rollout_ref.actor.clip_ratio_c=3"],
            ["clip_ratio_c"],
        ),
        (["algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=2"], ["horizon=2", "16 samples"]),
        (
            ["data.train_files={}/unnamed.parquet"],
            ["unnamed.parquet", "'data_source' (data.reward_fn_key)", "custom_reward_function"],
        ),
        (["data.train_files={}/no_target.parquet"], ["no_target.parquet", "no column 'reward_model'"]),
        (
            ["data.val_files={}/no_answer.parquet", "data.val_max_samples=2"],
            ["no_answer.parquet, row 5, field reward_model.ground_truth: found null", "strop/arithmetic"],
        ),
        (
            ["data.train_files=[{0}/train.parquet,{0}/unnamed.parquet]"],
            ["unnamed.parquet: there is no column 'data_source'"],
        ),
        (["actor_rollout_ref.rollout.name=vllm"], ["vllm", "hf"]),
        (["trainer.logger=[console,tensorbord]"], ["tensorbord", "tensorboard"]),
    ],
    ids=lambda value: value[0].replace("{}/", "") if isinstance(value, list) and "=" in value[0] else "",
)
def test_a_mistake_is_named_and_ends_with_status_2(inputs, tmp_path, capsys, change, messages):
    options = overrides(inputs, tmp_path / "run", *[text.format(inputs) for text in change])
    assert main(options) == 2
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    for message in messages:
        assert message in printed, printed


def test_all_mistakes_are_told_at_once(inputs, tmp_path, capsys):
    options = overrides(
        inputs,
        tmp_path / "run",
        "actor_rollout_ref.actor.ppo_mini_batch_size=3",
        "algorithm.adv_estimator=gea",
        "trainer.resume_mode=/nothing/here",
        "trainer.totl_epochs=3",
        "data.max_prompt_length=long",
    )
    assert main(options) == 2
    printed = capsys.readouterr().err
    for message in ("ppo_mini_batch_size", "gea", "/nothing/here", "totl_epochs", "found 'long'"):
        assert message in printed


def test_nothing_of_an_earlier_run_is_touched_by_a_run_that_cannot_start(inputs, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    assert main(overrides(inputs, run, "data.train_files=/nothing.parquet")) == 2
    capsys.readouterr()
    assert [path.name for path in run.iterdir()] == ["metrics.jsonl"]


def test_debug_shows_the_traceback(inputs, tmp_path):
    with pytest.raises(Exception, match="gea"):
        main([*overrides(inputs, tmp_path, "algorithm.adv_estimator=gea"), "--debug"])
