from __future__ import annotations

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from strop.cli.check import all_values, summary, tables
from strop.cli.main import main
from strop.config.checks.check import check
from strop.config.load import load_config
from strop.config.memory.choices import MOST_TOKENS

from messages import mentions


def shown(config, **sizes):
    console = Console(file=io.StringIO(), width=120)
    console.print(tables(check(config, **sizes), config))
    return console.file.getvalue()


@pytest.fixture
def overrides(valid):
    return [*valid, "actor_rollout_ref.rollout.n=2", "trainer.device=cpu"]


BY_ROWS = "actor_rollout_ref.actor.use_dynamic_bsz=False"


def row(text, name):
    (line,) = [line for line in text.splitlines() if name in line]
    return line.strip().split("  ")[-1].strip()


def test_the_report_shows_the_resolved_batch_sizes(overrides):
    text = shown(load_config([*overrides, "trainer.critic_warmup=10", BY_ROWS]), train_rows=7473)
    assert row(text, "samples per iteration") == "2,048 = 1,024 prompts x 2"
    assert row(text, "actor: optimizer steps per iteration") == "4 = 4 mini-batches x 1 ppo_epochs"
    assert row(text, "actor: samples in a mini-batch") == "512"
    assert row(text, "critic: micro-batches of a mini-batch") == "64 of 8 sequences"
    assert row(text, "reference log-probs: micro-batches") == "128 of 16 sequences"
    assert row(text, "iterations in the run") == "210"
    assert row(text, "samples in the run") == "430,080"
    assert row(text, "actor: optimizer steps in the run") == "800"
    assert row(text, "critic: optimizer steps in the run") == "840"
    assert row(text, "actor and rollout (hf)") == "this process"
    assert "unknown: a model that is not in a local folder" in text


def test_unknown_numbers_are_shown_as_unknown(overrides):
    written = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1500"
    text = shown(load_config([*overrides, written]))
    assert row(text, "iterations in the run") == "unknown: the training files were not read"
    for name in ("actor: micro-batches of a mini-batch", "old log-probs: micro-batches"):
        assert row(text, name) == "up to 1,500 tokens each"
    assert row(text, "critic: micro-batches") == f"up to {MOST_TOKENS:,} tokens each, chosen from the memory"
    assert "optimizer steps in the run" not in text
    text = shown(load_config([*overrides, "algorithm.adv_estimator=rloo", "trainer.total_training_steps=5"]))
    assert "critic: " not in text
    assert row(text, "actor: optimizer steps in the run") == "20"


def test_a_micro_batch_is_not_larger_than_its_mini_batch_and_weights_without_a_file_are_unknown(
    overrides, tmp_path
):
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 128}
    config_json = tmp_path / "model" / "config.json"
    small = [*overrides, BY_ROWS, "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    config_json.write_text(json.dumps({**shape, "vocab_size": 1000}))
    text = shown(load_config(small))
    assert row(text, "actor: micro-batches of a mini-batch") == "1 of 4 sequences"
    assert row(text, "old log-probs: micro-batches") == "1 of 8 sequences"
    assert row(text, "reference: weights") == "unknown"  # a folder without safetensors


def test_ranks_that_share_sequences_are_shown(overrides):
    shared = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", "trainer.n_gpus_per_node=4", BY_ROWS
    text = shown(load_config([*overrides, *shared, "actor_rollout_ref.model.use_remove_padding=True"]))
    assert row(text, "mini-batch, on each 2 ranks") == "32 of 8 sequences"
    assert row(text, "critic: micro-batches of a mini-batch, on each rank") == "16 of 8 sequences"


def test_the_verdict_comes_first_then_errors_and_warnings(overrides, capsys):
    sizes = ["data.train_batch_size=7", "actor_rollout_ref.actor.ppo_mini_batch_size=256"]
    wrong = [*overrides, *sizes, "critic.ulysses_sequence_parallel_size=2"]
    assert main(["check", "--full", *wrong]) == 2
    verdict, *lines = capsys.readouterr().out.splitlines()
    kinds = [line.partition(":")[0] for line in lines if line.startswith(("error:", "warning:"))]
    assert verdict == f"{kinds.count('error')} errors, 1 warning"
    assert kinds == sorted(kinds)  # errors before warnings
    assert mentions(lines[0], "ppo_mini_batch_size=256")
    assert "Batch sizes" not in "".join(lines)


def test_strop_check_counts_the_rows_and_returns_the_status(overrides, tmp_path, capsys):
    pq.write_table(pa.table({"prompt": ["1+1="] * 2048}), tmp_path / "train.parquet")
    assert main(["check", "--config-only", "--full", *overrides]) == 0
    assert row(capsys.readouterr().out, "training prompts") == "2,048"
    assert main(["check", *overrides, "data.train_files=/no/such.parquet"]) == 2
    assert mentions(capsys.readouterr().out, "data.train_files", "/no/such.parquet")


def test_the_estimate_of_memory_names_what_it_cannot_count_of_agents(overrides):
    for more, counted in ((["agent.command=x"], False), ([], True)):
        config = load_config([*overrides, *more])
        memory = summary(config, check(config), None)["memory"]
        assert ("without branches of sessions" in memory) is not counted


def test_the_report_shows_the_source_of_the_old_log_probs(overrides):
    one_step = [*overrides, "actor_rollout_ref.actor.ppo_mini_batch_size=1024"]
    for options, source in (
        (overrides, "from a pass before the update: several steps per iteration"),
        (one_step, "from a pass before the update: the KL in the reward needs them"),
        ([*one_step, "algorithm.kl_ctrl.kl_coef=0"], "from the update: it is one on-policy step"),
    ):
        assert row(shown(load_config(options)), "old log-probs  ") == source


def test_all_values_are_those_of_this_machine():
    lines = [line.strip() for line in all_values(load_config(["trainer.device=cpu"])).code.splitlines()]
    assert "n_gpus_per_node: 1  # this machine" in lines
    assert "device: cpu  # override" in lines
