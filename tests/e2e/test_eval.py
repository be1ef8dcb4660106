"""``strop eval`` and ``trainer.val_only``: nothing is trained, and the figures are those of the samples."""

from __future__ import annotations

import argparse
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean as mean

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import strop
from strop.cli.evaluate import add_arguments, config_from
from strop.cli.main import main
from strop.config.checks.check import check
from strop.config.load import load_config
from strop.errors import ConfigError
from strop.models.loader import load_scorer
from strop.rewards.score.answers import answer_extractor
from strop.tracking.jsonl import read_metrics
from strop.trainer.evaluation import settings
from strop.trainer.run_folder import RunFolder, run_lock
from strop.trainer.validation import make_report

import tiny_model
from builders import write_prompts
from messages import mentions, naming
from runs import make_inputs, metrics, overrides, train

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


def test_the_majority_counts_answers_as_the_scorer_reads_them():
    columns = {
        "data_source": ["strop/arithmetic"] * 8,
        "response": ["7", " 7 ", "3", "7", "3", "7", " 3", ""],
        "score": [1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0],
        "response_length": [1] * 8,
        "truncated": [False] * 8,
    }
    report = make_report(pa.table(columns), n=4, extractor_of=answer_extractor, seed=0)
    assert report.sources["strop/arithmetic"].scores["maj@4"].value == 0.5
    # what a tool says has no vote, and turns are not one text
    turns = [[{"text": "3"}], [{"text": " 7"}], [{"text": "7 "}], [{"text": "7"}]]
    told = {"conversation": [json.dumps({"turns": one}) for one in (*turns, *turns)]}
    told |= {"response": ["3", "77", "73", "7", "3", "37", "77", "7"], "score": [0.0, 1.0, 1.0, 1.0] * 2}
    report = make_report(pa.table(columns | told), n=4, extractor_of=answer_extractor, seed=0)
    assert report.sources["strop/arithmetic"].scores["maj@4"].value == 1.0
    # nor has a lost sample a vote
    lost = [{"turns": [{"text": "3"}], "error": "away"}] * 3
    played = [{"turns": [{"text": "7"}]}, *lost] * 2
    told |= {"conversation": [*map(json.dumps, played)], "score": [1.0, -1.0, -1.0, -1.0] * 2}
    report = make_report(pa.table(columns | told), n=4, extractor_of=answer_extractor, seed=0)
    assert report.sources["strop/arithmetic"].scores["maj@4"].value == 1.0


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


def test_the_size_of_batches_changes_no_sample(inputs, tmp_path):
    options = ("--data", inputs / "val.parquet", "--n", "2")
    whole, parts = (evaluate(inputs, tmp_path / size, *options, "--batch-size", size)[1] for size in "83")
    assert len(parts) == 12
    assert [row["response_ids"] for row in parts] == [row["response_ids"] for row in whole]


BY_NAME = """
import asyncio

open_now = most = 0

async def judge(response, messages, n_response_tokens):
    global open_now, most
    open_now += 1
    most = max(most, open_now)
    await asyncio.sleep(0.01)
    open_now -= 1
    return {"score": len(response), "sum": len(messages[0]["content"]), "most": most}

def batch(prompts, completions, reward_model, **kwargs):
    assert len(prompts) == 6 and kwargs["data_source"] == ["strop/arithmetic"] * 6
    return [len(one[0]["content"]) if target["ground_truth"] != "3" else None
            for one, target in zip(completions, reward_model)]
"""


@pytest.mark.parametrize("name", ["judge", "batch"])
def test_async_and_batch_functions_take_values_by_name(inputs, tmp_path, name):
    (tmp_path / "by_name.py").write_text(BY_NAME)
    found, samples = evaluate(
        inputs, tmp_path / "out", "--data", inputs / "val.parquet", "--custom-reward",
        f"{tmp_path / 'by_name.py'}:{name}", "reward_model.max_concurrency=2",
    )  # fmt: skip
    applies = [name == "judge" or row["ground_truth"] != "3" for row in samples]
    expected = [float(len(row["response"])) * does for row, does in zip(samples, applies, strict=True)]
    assert [row["score"] for row in samples] == expected
    scored = [score for score, does in zip(expected, applies, strict=True) if does]
    assert found["sources"]["strop/arithmetic"]["scores"]["mean@1"]["value"] == pytest.approx(mean(scored))
    if name == "judge":
        assert max(row["reward/most"] for row in samples) == 2
        assert {row["reward/sum"] for row in samples} == {4.0}


def test_figures_are_those_of_the_samples_of_several_files(inputs, tmp_path, capsys):
    """Scores are lengths, except that one prompt of the second file cannot be scored."""
    (tmp_path / "reward.py").write_text(
        f"{LENGTH}\n"
        "def length_or_failure(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if (data_source, ground_truth) == ('someone/elses', '2'):\n"
        "        raise ArithmeticError\n"
        "    return compute_score(data_source, solution_str, ground_truth)\n"
    )
    found, samples = evaluate(
        inputs, tmp_path / "out", "--data", inputs / "val.parquet", "--data", inputs / "other.parquet",
        "--custom-reward", f"{tmp_path / 'reward.py'}:length_or_failure", "reward_model.max_error_rate=0.5",
        "--limit", "3", "--n", "4", "--batch-size", "4",
    )  # fmt: skip
    assert [row["data_source"] for row in samples] == ["strop/arithmetic"] * 12 + ["someone/elses"] * 12
    printed = capsys.readouterr().out
    for source, figures in found["sources"].items():
        rows = [row for row in samples if row["data_source"] == source]
        failed = [(source, row["ground_truth"]) == ("someone/elses", "2") for row in rows]
        assert [row["reward_failed"] for row in rows] == failed
        assert figures["error_rate"] == pytest.approx(mean(failed))
        lengths = [0 if fails else len(row["response"]) for row, fails in zip(rows, failed, strict=True)]
        groups = [lengths[start : start + 4] for start in range(0, 12, 4)]
        scores = {name: score["value"] for name, score in figures["scores"].items()}
        assert scores["mean@4"] == pytest.approx(mean(lengths))
        assert scores["best@4"] == pytest.approx(mean(map(max, groups)))
        assert scores["worst@4"] == pytest.approx(mean(map(min, groups)))
        assert "maj@4" not in scores
        assert all(score["low"] <= score["value"] <= score["high"] for score in figures["scores"].values())
        assert (figures["prompts"], figures["samples"]) == (3, 12)
        assert figures["mean_length"] == pytest.approx(mean(len(row["response_ids"]) for row in rows))
        assert figures["truncated"] == pytest.approx(mean(row["truncated"] for row in rows))
        assert mentions(printed, source, "mean@4", f"{scores['mean@4']:.3f}", "best@4", tmp_path)


def test_a_reward_model_scores_only_sources_without_a_rule(inputs, tmp_path):
    files = ("--data", inputs / "val.parquet", "--data", inputs / "other.parquet")
    model = ("--reward-model", inputs / "reward_model")
    _, samples = evaluate(inputs, tmp_path, *files, *model, "reward_model.model.input_tokenizer=null")
    for row in samples:
        part = "reward/reward_model" if row["data_source"] == "someone/elses" else "reward/rule"
        assert row["score"] == pytest.approx(row[part])
        assert [name for name in ("reward/rule", "reward/reward_model") if row[name] is not None] == [part]
    assert len({row["reward/reward_model"] for row in samples}) > 2


def test_a_run_folder_stands_for_one_of_its_models(trained):
    scores = {line["step"]: line["val/test_score/strop/arithmetic"] for line in metrics(trained)}
    best = max((1, 2), key=lambda step: (scores[step], step))
    paths = {1: trained / "global_step_1" / "actor" / "huggingface", 2: trained / "final_model"}
    for which, step in (({}, 2), ({"step": 1}, 1), ({"step": 2}, 2), ({"best": True}, best)):
        found = settings(str(trained), (), **which)["actor_rollout_ref.model.path"]
        assert Path(found) == paths[step]


VAL = ("--data", "{}/val.parquet")


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (("{}/model", "--data", "{}/nothing.parquet"), ["--data: no file", "nothing.parquet"]),
        (("{}/model", "--data", "a.csv,b.csv"), ["--data: no file a.csv,b.csv", "--data a.csv --data b.csv"]),
        (("{}/nowhere", *VAL), ["MODEL={}/nowhere"]),
        (("{}/model", *VAL, "data.val_batch_size=0"), ["data.val_batch_size: found 0"]),
        (("{}/model", *VAL, "--max-prompt-length", "2"), ["--max-prompt-length is 2"]),
        (("{}/trained", *VAL, "--step", "7"), ["{}/trained", "iteration 7", "1, 2"]),
        (("{}/model", "--data", "{}/other.parquet"), ["someone/elses", "--reward=FILE.py"]),
        (("{}/reward_model", *VAL), ["{}/reward_model", "--reward-model"]),
        (("{}/model", *VAL, "--n", "0"), ["--n: found 0"]),
        (("{}/model", *VAL, "--reward", "{}/length.py:no"), ["--reward={}/length.py", "no function no"]),
        (("{}/model", *VAL, "--out", "{}/done"), ["done", "results.json"]),
        (("{}/model", *VAL, "--out", "{}/trained"), ["--out={}/trained", "a run", "metrics.jsonl"]),
        (("{}/model", *VAL, "--out", "{}"), ["--out={}", "a run", "config.yaml"]),
    ],
)
def test_mistakes_are_errors_before_a_model_is_loaded(
    inputs, trained, capsys, monkeypatch, arguments, messages, tmp_path
):
    def load(*_, **__):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("strop.engines.torch.engine.load_causal_lm", load)
    monkeypatch.chdir(tmp_path)
    (inputs / "done").mkdir(exist_ok=True)
    (inputs / "done" / "results.json").touch()
    (inputs / "config.yaml").touch()
    assert main(["eval", *(text.format(inputs) for text in arguments), "trainer.device=cpu"]) == 2
    assert mentions(capsys.readouterr().err, *(message.format(inputs) for message in messages))


def test_val_only_loads_the_actor_alone_and_finds_what_eval_finds(inputs, tmp_path, capsys):
    run = tmp_path / "run"
    trainer = train(
        overrides(
            inputs,
            run,
            "trainer.val_only=True",
            "data.train_files=/nowhere/train.parquet",
            "critic.model.path=/nowhere/critic",
            "reward_model.enable=True",  # rules score every source
            f"reward_model.model.path={inputs / 'reward_model'}",
            "reward_model.model.input_tokenizer=null",
            "algorithm.kl_ctrl.kl_coef=0.1",
            "actor_rollout_ref.actor.ppo_mini_batch_size=7",  # does not divide: nothing to divide
            *SAMPLED,
        )
    )
    assert (list(trainer.groups), trainer.ref, trainer.global_step) == (["actor"], None, 0)
    engine = trainer.actor.worker.engine
    assert engine._optimizer is None
    assert not any(weight.requires_grad for weight in engine.module.parameters())
    assert "mean@4" in capsys.readouterr().out
    assert not (run / "final_model").exists()

    (line,) = read_metrics(run / "metrics.jsonl")
    report = json.loads((run / "validation" / "step_000000.json").read_text())
    scores = report["sources"]["strop/arithmetic"]["scores"]
    assert list(scores) == ["mean@4", "best@2", "worst@2", "best@4", "worst@4", "maj@2", "maj@4"]
    for name, score in scores.items():
        assert line[f"val/strop/arithmetic/{name}"] == score["value"]
    assert line["val/test_score/strop/arithmetic"] == scores["mean@4"]["value"]

    found, samples = evaluate(inputs, tmp_path / "out", "--data", inputs / "val.parquet", "--n", "4")
    assert found["sources"] == report["sources"]
    assert samples == pq.read_table(run / "validation" / "step_000000.parquet").to_pylist()
    assert len(samples) == 24


def test_val_only_takes_the_placement_of_a_training_run_as_it_is(inputs, tmp_path):
    pools = "+trainer.resource_pools={policy: [1], others: [1]}"
    placed = "+trainer.placement={ActorRollout: policy, Critic: others}"
    options = overrides(inputs, tmp_path, pools, placed)
    assert check(load_config(options)).errors == []
    result = check(load_config([*options, "trainer.val_only=True"]))
    assert result.errors == []
    assert not any("placement" in line for line in result.warnings)


def require_same_validation(run, trained, step):
    """Compare the samples and the figures of the validation after ``step``."""
    name = f"validation/step_{step:06}.parquet"
    assert without_log_probs(run / name) == without_log_probs(trained / name)
    found, expected = (
        next(line for line in read_metrics(folder / "metrics.jsonl") if line["step"] == step)
        for folder in (run, trained)
    )
    for figure in ("val/test_score/strop/arithmetic", "val/strop/arithmetic/best@2"):
        assert found[figure] == expected[figure] > 0


def test_val_only_finds_what_the_run_found_and_leaves_its_record(inputs, trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    record = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    look_at(inputs, run)
    require_same_validation(run, trained, 2)
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [0, 1, 2]
    changed = {path.name for path, content in record.items() if path.read_bytes() != content}
    assert changed <= {"metrics.jsonl", "step_000002.parquet"}
    assert not list(run.glob("previous_*"))


def test_val_only_of_an_earlier_checkpoint_in_a_separate_folder(inputs, trained, tmp_path):
    look_at(inputs, tmp_path, f"trainer.resume_mode={trained / 'global_step_1'}")
    require_same_validation(tmp_path, trained, 1)
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1]


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


def test_an_evaluation_that_was_killed_before_its_last_file_is_repeated(inputs, tmp_path):
    for name in ("samples.parquet", "config.yaml"):
        (tmp_path / name).touch()
    assert len(evaluate(inputs, tmp_path, "--data", inputs / "val.parquet", "--limit", "2")[1]) == 2


def test_a_reward_model_is_one_by_its_own_class(tmp_path):
    """Folders with code name classes for both uses; adapters have no config.json."""
    both = {"AutoModelForCausalLM": "m.ForCausalLM", "AutoModelForSequenceClassification": "m.AForS"}
    described = {"architectures": ["MyForCausalLM"], "auto_map": both, "model_type": "mine"}
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert settings(str(tmp_path), ["a.parquet"])["actor_rollout_ref.model.path"] == str(tmp_path)
    (tmp_path / "config.json").unlink()
    adapter = {"task_type": "SEQ_CLS", "base_model_name_or_path": "org/model"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    with pytest.raises(ConfigError, match=naming(str(tmp_path), "--reward-model")):
        settings(str(tmp_path), ["a.parquet"])


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
    arguments = [str(inputs / "model"), "--data", "val.parquet", "--reward", given]
    custom = config_from(parser.parse_args(arguments)).custom_reward_function
    assert (custom.path, custom.name) == (path, name)


@pytest.mark.parametrize(
    ("written", "expected"),
    [({}, (1024, 512)), ({"window": 256}, (128, 128)), ({"window": 256, "max_response_length": 8}, (248, 8))],
)
def test_lengths_that_nobody_wrote_fit_into_the_context_window(inputs, tmp_path, written, expected):
    model = tmp_path / "model"
    shutil.copytree(inputs / "model", model)
    content = json.loads((model / "config.json").read_text())
    window = written.get("window", 4096)
    (model / "config.json").write_text(json.dumps(content | {"max_position_embeddings": window}))
    lengths = {name: value for name, value in written.items() if name != "window"}
    data = settings(str(model), ("x",), **lengths)["data"]
    assert (data["max_prompt_length"], data["max_response_length"]) == expected


def test_an_adapter_is_evaluated_on_its_base_model(inputs, tmp_path):
    final = tmp_path / "run" / "final_model"
    final.mkdir(parents=True)
    (final / "adapter_model.safetensors").write_bytes(b"")
    (final / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(inputs / "model")}))
    keys = settings(str(final), ())
    assert keys["actor_rollout_ref.model.path"] == str(inputs / "model")
    assert keys["actor_rollout_ref.model.lora_adapter_path"] == str(final)
    (final / "adapter_config.json").write_text('{"base_model_name_or_path": "s3://elsewhere/model"}')
    assert settings(str(final), ())["actor_rollout_ref.model.path"] == str(final)


def test_rows_for_the_reward_model_are_its_alone(inputs, tmp_path):
    """Also where a function scores the other rows, as in training."""
    rows = pq.read_table(inputs / "val.parquet").to_pylist()
    for row in rows[1::2]:
        row["reward_model"] = {"style": "model", "ground_truth": ""}
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "mixed.parquet")
    model = ("reward_model.enable=True", f"reward_model.model.path={inputs / 'reward_model'}")
    look_at(inputs, tmp_path / "run", f"data.val_files={tmp_path / 'mixed.parquet'}", *model)
    samples = pq.read_table(tmp_path / "run/validation/step_000000.parquet").to_pylist()
    by_model = {row["prompt"][0]["content"] for row in rows[1::2]} - {
        row["prompt"][0]["content"] for row in rows[::2]
    }
    assert by_model
    for sample in samples:
        is_models = any(text in sample["prompt"] for text in by_model)
        assert (sample["reward/rule"] is None) is is_models
        assert sample["score"] == sample["reward/reward_model" if is_models else "reward/rule"]


def test_two_evaluations_at_once_do_not_share_a_folder(inputs, tmp_path, capsys):
    with run_lock(RunFolder(tmp_path / "out").path), ThreadPoolExecutor() as pool:
        arguments = [
            "eval",
            str(inputs / "model"),
            "--data",
            str(inputs / "val.parquet"),
            "trainer.device=cpu",
        ]
        assert pool.submit(main, [*arguments, "--out", str(tmp_path / "out")]).result() == 2
    assert "another run is using this folder" in capsys.readouterr().err
    assert not (tmp_path / "out" / "results.json").exists()


def test_a_run_in_the_folder_of_an_evaluation_moves_its_files_with_their_configuration(tmp_path):
    for name in ("samples.parquet", "results.json"):
        (tmp_path / name).touch()
    folder = RunFolder(tmp_path)
    folder.archive_previous_run()  # without a configuration they are of somebody else
    assert (tmp_path / "samples.parquet").exists()
    (tmp_path / "config.yaml").touch()
    folder.archive_previous_run()
    moved = {path.name for path in (tmp_path / "previous_1").iterdir()}
    assert moved == {"config.yaml", "samples.parquet", "results.json"}


def test_a_model_object_is_no_path(inputs):
    model = AutoModelForCausalLM.from_pretrained(inputs / "model")
    with pytest.raises(ConfigError, match=naming("Qwen2ForCausalLM", "save_pretrained")):
        strop.evaluate(model, inputs / "val.parquet")
