"""``strop eval`` and ``trainer.val_only``: nothing is trained, and the figures are those of the samples."""

from __future__ import annotations

import argparse
import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from strop.cli.evaluate import add_arguments, config_from
from strop.cli.main import main
from strop.config.checks.check import check
from strop.config.load import load_config
from strop.models.loader import load_scorer
from strop.tracking.jsonl import read_metrics
from strop.trainer.build import build_trainer

import tiny_model
from builders import write_prompts
from runs import make_inputs, overrides, train

SAMPLED = [
    "actor_rollout_ref.rollout.val_kwargs.n=4",
    "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
    "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
]
LENGTH = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    "    return float(len(solution_str))\n"
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = make_inputs(tmp_path_factory.mktemp("inputs"))
    write_prompts(folder / "other.parquet", 4, data_source="someone/elses")
    (folder / "length.py").write_text(LENGTH)
    load_scorer(folder / "model", fresh_head_seed=5).save_pretrained(folder / "reward_model")
    tiny_model.build_tokenizer().save_pretrained(folder / "reward_model")
    return folder


@pytest.fixture(scope="module")
def trained(inputs):
    """A run of two iterations with a checkpoint of each, validated after each with four samples a prompt."""
    run, reward = inputs / "trained", f"custom_reward_function.path={inputs / 'length.py'}"
    train(overrides(inputs, run, "trainer.save_freq=1", "trainer.test_freq=1", reward, *SAMPLED))
    return run


def look_at(inputs, run, *options):
    """Validate the policy of a checkpoint."""
    reward = f"custom_reward_function.path={inputs / 'length.py'}"
    return train(overrides(inputs, run, "trainer.val_only=True", reward, *SAMPLED, *options))


def without_log_probs(path):
    """The samples; log-probs depend in their last digit on where in memory the weights lie."""
    return pq.read_table(path).drop_columns("rollout_log_probs")


def evaluate(inputs, out, *arguments):
    status = main(
        [
            "eval", str(inputs / "model"), "--max-prompt-length", "8", "--max-response-length", "4",
            "--out", str(out), *map(str, arguments),
            f"data.cache_dir={inputs / 'cache'}", "trainer.device=cpu",
        ]
    )  # fmt: skip
    assert status == 0
    return json.loads((out / "results.json").read_text()), pq.read_table(out / "samples.parquet").to_pylist()


def prompts_of(rows):
    by_prompt = {}
    for row in rows:
        by_prompt.setdefault((row["data_source"], row["prompt"], row["uid"]), []).append(row)
    return list(by_prompt.values())


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def test_the_figures_are_those_of_the_samples(inputs, tmp_path, capsys):
    # The model never hits the right sum; so the right answers are what it says often.
    rows = pq.read_table(inputs / "val.parquet").to_pylist()
    _, probe = evaluate(
        inputs, tmp_path / "probe", "--data", inputs / "val.parquet", "--n", "8", "--temperature", "0.4"
    )
    for row, samples in zip(rows, prompts_of(probe), strict=True):
        common = Counter(sample["response"].strip() for sample in samples if sample["response"].strip())
        row["reward_model"]["ground_truth"] = common.most_common()[0][0]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "val.parquet")
    capsys.readouterr()

    found, samples = evaluate(
        inputs, tmp_path / "out", "--data", tmp_path / "val.parquet", "--n", "8", "--temperature", "0.4"
    )
    printed = capsys.readouterr().out
    source = found["sources"]["strop/arithmetic"]
    assert (source["prompts"], source["samples"], len(samples)) == (6, 48, 48)
    right = [
        [row["response"].strip() == row["ground_truth"] for row in group] for group in prompts_of(samples)
    ]
    scores = {name: score["value"] for name, score in source["scores"].items()}
    assert 0 < scores["mean@8"] == pytest.approx(mean(mean(flags) for flags in right))
    assert scores["best@8"] == pytest.approx(mean(max(flags) for flags in right))
    assert scores["worst@8"] == pytest.approx(mean(min(flags) for flags in right))
    votes = [
        Counter(row["response"].strip() for row in group if row["response"].strip())
        for group in prompts_of(samples)
    ]
    leaders = [[answer for answer, n in vote.items() if n == max(vote.values())] for vote in votes]
    majority = mean(
        mean(answer == group[0]["ground_truth"] for answer in tied)
        for tied, group in zip(leaders, prompts_of(samples), strict=True)
    )
    assert 0 < scores["maj@8"] == pytest.approx(majority)
    assert all(score["low"] <= score["value"] <= score["high"] for score in source["scores"].values())
    assert source["mean_length"] == pytest.approx(mean(len(row["response_ids"]) for row in samples))
    assert source["truncated"] == pytest.approx(mean(row["truncated"] for row in samples))
    assert source["error_rate"] == 0
    for text in (
        "strop/arithmetic",
        "mean@8",
        "best@8",
        "maj@8",
        f"{scores['mean@8']:.3f}",
        str(tmp_path),
    ):
        assert text in printed, printed


def test_greedy_answers_are_those_of_transformers(inputs, tmp_path):
    found, samples = evaluate(inputs, tmp_path, "--data", inputs / "val.parquet")
    model = AutoModelForCausalLM.from_pretrained(inputs / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    for sample in samples:
        ids = torch.tensor([sample["prompt_ids"]])
        with torch.no_grad():
            whole = model.generate(
                ids, do_sample=False, max_new_tokens=4, attention_mask=torch.ones_like(ids)
            )
        assert whole[0, ids.shape[1] :].tolist() == sample["response_ids"]
        assert tokenizer.decode(sample["response_ids"], skip_special_tokens=True) == sample["response"]
    assert list(found["sources"]["strop/arithmetic"]["scores"]) == ["mean@1"]


def test_several_files_a_limit_and_a_reward_of_ones_own(inputs, tmp_path):
    files = ("--data", inputs / "val.parquet", "--data", inputs / "other.parquet")
    reward = ("--custom-reward", f"{inputs / 'length.py'}:compute_score")
    found, samples = evaluate(
        inputs, tmp_path, *files, *reward, "--limit", "3", "--n", "2", "--batch-size", "4"
    )
    assert [row["data_source"] for row in samples] == ["strop/arithmetic"] * 6 + ["someone/elses"] * 6
    for source, figures in found["sources"].items():
        lengths = [len(row["response"]) for row in samples if row["data_source"] == source]
        assert figures["scores"]["mean@2"]["value"] == pytest.approx(mean(lengths))
        assert "best@2" in figures["scores"]
        assert "maj@2" not in figures["scores"]


def test_a_reward_model_scores_what_no_rule_can(inputs, tmp_path):
    files = ("--data", inputs / "val.parquet", "--data", inputs / "other.parquet")
    model = ("--reward-model", inputs / "reward_model")
    _, samples = evaluate(inputs, tmp_path, *files, *model, "reward_model.model.input_tokenizer=null")
    scored = [row for row in samples if row["data_source"] == "someone/elses"]
    assert len(scored) == 4
    assert all(row["score"] == pytest.approx(row["reward/reward_model"]) != 0 for row in scored)
    assert all(row["reward/reward_model"] is None for row in samples if row not in scored)


def test_samples_that_cannot_be_scored_are_counted(inputs, tmp_path):
    (tmp_path / "picky.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return 1 / (extra_info['index'] - 2)\n"
    )
    found, samples = evaluate(
        inputs, tmp_path / "out", "--data", inputs / "val.parquet", "--custom-reward", tmp_path / "picky.py",
        "reward_model.max_error_rate=0.5",
    )  # fmt: skip
    assert [row["reward_failed"] for row in samples] == [False, False, True, False, False, False]
    assert found["sources"]["strop/arithmetic"]["error_rate"] == pytest.approx(1 / 6)


VAL = ("--data", "{}/val.parquet")


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (("{}/model", "--data", "{}/nothing.parquet"), ["data.val_files", "nothing.parquet"]),
        (("{}/nowhere", *VAL), ["nowhere"]),
        (("{}/trained/global_step_2", *VAL), ["strop export --role actor {}/trained/global_step_2 --out"]),
        (("{}/trained", *VAL), ["strop export --role actor {}/trained/global_step_2 --out"]),
        (("{}/model", "--data", "{}/other.parquet"), ["someone/elses", "--custom-reward"]),
        (("{}/rewards", *VAL), ["strop export --role reward_model {}/rewards/global_step_7 --out"]),
        (("{}/rewards/global_step_7", *VAL), ["{}/rewards/global_step_7 --out", "--reward-model"]),
        (("{}/model", *VAL, "--max-prompt-length", "2"), ["val.parquet, row 0", "max_prompt_length"]),
        (("{}/model", *VAL, "--n", "0"), ["val_kwargs.n", "0"]),
        (("{}/model", *VAL, "--custom-reward", "{}/length.py:no"), ["length.py", "no"]),
        (("{}/model", *VAL, "trainer.vall_only=1"), ["vall_only", "trainer.val_only"]),
        (("{}/model", *VAL, "--out", "{}/done"), ["done", "results.json"]),
    ],
)
def test_mistakes_are_told_before_a_model_is_loaded(
    inputs, trained, capsys, monkeypatch, arguments, messages, tmp_path
):
    def load(*_, **__):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("strop.engines.torch.engine.load_causal_lm", load)
    monkeypatch.chdir(tmp_path)
    (inputs / "rewards" / "global_step_7" / "reward_model").mkdir(parents=True, exist_ok=True)
    (inputs / "done").mkdir(exist_ok=True)
    (inputs / "done" / "results.json").touch()
    assert main(["eval", *(text.format(inputs) for text in arguments), "trainer.device=cpu"]) == 2
    told = capsys.readouterr().err
    assert all(message.format(inputs) in told for message in messages), told


def test_val_only_needs_neither_training_files_nor_a_critic(inputs, tmp_path, capsys):
    options = overrides(
        inputs,
        tmp_path,
        "trainer.val_only=True",
        "data.train_files=/nowhere/train.parquet",
        "critic.model.path=/nowhere/critic",
        "algorithm.kl_ctrl.kl_coef=0.1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=7",  # does not divide: nothing to divide
        *SAMPLED,
    )
    trainer = build_trainer(load_config(options))
    trainer.init_workers()
    trainer.fit()
    assert list(trainer.groups) == ["actor"]
    assert trainer.ref is None
    engine = trainer.actor.worker.engine
    assert engine._optimizer is None
    assert not any(weight.requires_grad for weight in engine.module.parameters())
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    report = json.loads((tmp_path / "validation" / "step_000000.json").read_text())
    assert len(pq.read_table(tmp_path / "validation" / "step_000000.parquet")) == 24
    scores = report["sources"]["strop/arithmetic"]["scores"]
    assert list(scores) == ["mean@4", "best@2", "worst@2", "best@4", "worst@4", "maj@2", "maj@4"]
    for name, score in scores.items():
        assert line[f"val/strop/arithmetic/{name}"] == score["value"]
    assert line["val/test_score/strop/arithmetic"] == scores["mean@4"]["value"]
    printed = capsys.readouterr().out
    assert "mean@4" in printed
    assert not (tmp_path / "final_model").exists()


def test_val_only_takes_the_placement_of_a_training_run_as_it_is(inputs, tmp_path):
    pools = "+trainer.resource_pools={policy: [1], others: [1]}"
    placed = "+trainer.placement={ActorRollout: policy, Critic: others}"
    options = overrides(inputs, tmp_path, pools, placed)
    assert check(load_config(options)).errors == []
    result = check(load_config([*options, "trainer.val_only=True"]))
    assert result.errors == []
    assert not any("placement" in line for line in result.warnings)


def test_val_only_loads_a_reward_model_only_where_no_rule_can_score(inputs, tmp_path):
    model = ("reward_model.enable=True", f"reward_model.model.path={inputs / 'reward_model'}")
    options = overrides(
        inputs, tmp_path, *model, "reward_model.model.input_tokenizer=null", "trainer.val_only=True"
    )
    assert list(train(options).groups) == ["actor"]
    other = (f"data.val_files={inputs / 'other.parquet'}", f"trainer.default_local_dir={tmp_path / 'other'}")
    assert list(train([*options, *other]).groups) == ["actor", "reward_model"]


def test_val_only_finds_what_the_run_found_and_leaves_its_record(inputs, trained):
    record = {path: path.read_bytes() for path in sorted(trained.rglob("*")) if path.is_file()}
    before = read_metrics(trained / "metrics.jsonl")
    samples = without_log_probs(trained / "validation" / "step_000002.parquet")
    look_at(inputs, trained)
    after = read_metrics(trained / "metrics.jsonl")
    assert [line["step"] for line in after] == [line["step"] for line in before] == [0, 1, 2]
    for name in ("val/test_score/strop/arithmetic", "val/strop/arithmetic/best@2"):
        assert after[-1][name] == before[-1][name] > 0
    assert without_log_probs(trained / "validation" / "step_000002.parquet") == samples
    changed = {path.name for path, content in record.items() if path.read_bytes() != content}
    assert changed <= {"metrics.jsonl", "step_000002.parquet"}
    assert not list(trained.glob("previous_*"))


def test_val_only_of_an_earlier_checkpoint_in_a_folder_of_its_own(inputs, trained, tmp_path):
    look_at(inputs, tmp_path, f"trainer.resume_mode={trained / 'global_step_1'}")
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    (expected,) = [step for step in read_metrics(trained / "metrics.jsonl") if step["step"] == line["step"]]
    assert line["step"] == 1
    name = "step_000001.parquet"
    assert without_log_probs(tmp_path / "validation" / name) == without_log_probs(
        trained / "validation" / name
    )
    assert line["val/test_score/strop/arithmetic"] == expected["val/test_score/strop/arithmetic"]


def test_eval_finds_what_val_only_finds(inputs, tmp_path):
    train(overrides(inputs, tmp_path / "run", "trainer.val_only=True", *SAMPLED))
    found, samples = evaluate(inputs, tmp_path / "out", "--data", inputs / "val.parquet", "--n", "4")
    report = json.loads((tmp_path / "run" / "validation" / "step_000000.json").read_text())
    assert found["sources"] == report["sources"]
    same = pq.read_table(tmp_path / "run" / "validation" / "step_000000.parquet").to_pylist()
    assert samples == same


@pytest.mark.slow
def test_two_ranks_give_the_samples_of_one(ray_session, inputs, tmp_path):
    arguments = ("--data", inputs / "val.parquet", "--n", "4")
    alone, samples = evaluate(inputs, tmp_path / "one", *arguments)
    shared, _ = evaluate(inputs, tmp_path / "two", *arguments, "trainer.n_gpus_per_node=2")
    assert shared["sources"] == alone["sources"]
    together = without_log_probs(tmp_path / "two" / "samples.parquet").to_pylist()
    assert together == without_log_probs(tmp_path / "one" / "samples.parquet").to_pylist()
    assert len(samples) == 24


def test_samples_are_kept_when_the_report_fails(inputs, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise ArithmeticError("a figure that cannot be worked out")

    monkeypatch.setattr("strop.trainer.validation.make_report", fail)
    with pytest.raises(ArithmeticError):
        evaluate(inputs, tmp_path, "--data", inputs / "val.parquet")
    assert len(pq.read_table(tmp_path / "samples.parquet")) == 6
    assert not (tmp_path / "results.json").exists()


def test_answers_do_not_vote_where_a_registered_scorer_judges_them(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr("strop.rewards.router._registered", {"strop/arithmetic": lambda **sample: 0.5})
    found, _ = evaluate(inputs, tmp_path, "--data", inputs / "val.parquet", "--n", "2")
    assert set(found["sources"]["strop/arithmetic"]["scores"]) == {"mean@2", "best@2", "worst@2"}


@pytest.mark.parametrize(
    ("given", "path", "name"),
    [
        ("reward.py", "reward.py", "compute_score"),
        ("my/reward.py:mine", "my/reward.py", "mine"),
        ("s3://bucket/reward.py", "s3://bucket/reward.py", "compute_score"),
        ("http://host:80/reward.py:mine", "http://host:80/reward.py", "mine"),
    ],
)
def test_a_reward_function_may_lie_at_a_url(inputs, given, path, name):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = [str(inputs / "model"), "--data", "val.parquet", "--custom-reward", given]
    custom = config_from(parser.parse_args(arguments)).custom_reward_function
    assert (custom.path, custom.name) == (path, name)
