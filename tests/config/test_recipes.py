"""Shipped recipes, and those of examples/, which pass ``strop check`` without models and GPUs."""

from __future__ import annotations

import json
import re
import string
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import tulu3_data  # examples/ is on the path, see conftest.py
from safetensors.numpy import save_file

from strop.cli.main import main
from strop.config.checks.check import check
from strop.config.keys import all_keys
from strop.config.load import load_config, load_tree
from strop.config.placement import Placement
from strop.config.schema import Config
from strop.config.trees import PPO
from strop.errors import ConfigError
from strop.trainer.commands import fitted

import demo
import tiny_model
from builders import write_prompts
from messages import mentions

EXAMPLES = Path(__file__).parents[2] / "examples"
OPTIM = "actor_rollout_ref.actor.optim"
FILES = {"async_debug": ("gsm8k/train", "gsm8k/test"), "tulu3_ppo_8b": ("tulu3/train", "tulu3/val")}


@pytest.mark.parametrize(
    ("recipe", "overrides", "expected"),
    [
        ("grpo", [], ("grpo", 8, 0.0, 32, 32)),
        ("grpo", ["data.train_batch_size=64"], ("grpo", 8, 0.0, 64, 64)),
        ("grpo", ["algorithm.adv_estimator=rloo"], ("rloo", 8, 0.005, 32, 32)),
        ("grpo", ["algorithm={adv_estimator: 'my:own'}"], ("my:own", 1, 0.005, 32, 32)),
        ("grpo", ["algorithm.adv_estimator=gae", "actor_rollout_ref.rollout.n=2"], ("gae", 2, 0.005, 32, 32)),
        ("ppo", [], ("gae", 1, 0.005, 32, 32)),
        ("ppo", ["algorithm.kl_ctrl.kl_coef=0.1"], ("gae", 1, 0.1, 32, 32)),
        (None, [], ("gae", 1, 0.005, 1024, 256)),
    ],
)
def test_values_of_a_shipped_recipe_follow_the_estimator(recipe, overrides, expected):
    config = load_tree(PPO, overrides, recipe=recipe)
    policy, algorithm = config.actor_rollout_ref, config.algorithm
    sizes = config.data.train_batch_size, policy.actor.ppo_mini_batch_size
    assert (algorithm.adv_estimator, policy.rollout.n, algorithm.kl_ctrl.kl_coef, *sizes) == expected


def _model(folder: Path, parameters: int) -> str:
    shape = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 10}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape))
    save_file({"weight": np.zeros(parameters, dtype=np.int8)}, folder / "model.safetensors")
    return f"actor_rollout_ref.model.path={folder}"


def test_the_rate_of_a_recipe_is_by_the_size_of_the_policy_unless_it_is_set(tmp_path):
    def rates(*options, recipe: str | None = "ppo") -> tuple[float, float]:
        config = load_tree(PPO, options, recipe=recipe)
        return config.actor_rollout_ref.actor.optim.lr, config.critic.optim.lr

    # 1e-5 x (1e8 / 133,000)^0.6 = 5.32e-4
    model, lora = _model(tmp_path / "model", 133_000), "actor_rollout_ref.model.lora_rank=8"
    assert rates(model) == (5e-4, 5e-4)
    assert rates(model, lora) == (2e-3, 5e-4)  # the critic has no adapters
    assert rates(model, lora, "critic.model.lora_rank=8") == (2e-3, 2e-3)
    assert rates(model, f"{OPTIM}.lr=1e-4") == (1e-4, 1e-4)
    assert rates(model, "critic.optim.lr=1e-4") == (5e-4, 1e-4)
    assert rates("actor_rollout_ref.model.path=owner/name") == (1e-6, 1e-5)
    assert rates("actor_rollout_ref.model.path=owner/name", lora) == (1e-4, 1e-5)
    assert rates(model, recipe=None) == (1e-6, 1e-5)
    with pytest.raises(ConfigError, match="lora_rank") as wrong:
        rates(model, "actor_rollout_ref.model.lora_rank=no")
    assert "optim.lr" not in str(wrong.value)


@pytest.mark.parametrize(
    ("options", "actor", "critic", "critic_alone"),
    [
        (["trainer.total_training_steps=400"], 20, 20, 10),
        (["trainer.total_training_steps=50"], 12, 12, 10),
        (["trainer.total_training_steps=3"], 0, 0, 0),
        (["trainer.total_epochs=4"], 8, 8, 8),  # of 256 rows: 32 iterations
        (["trainer.total_epochs=4", f"{OPTIM}.lr_warmup_steps=15"], 15, 15, 8),
        (["trainer.total_epochs=4", "critic.optim.lr_warmup_steps=15"], 8, 15, 8),
        (
            ["trainer.total_epochs=4", f"{OPTIM}.lr_warmup_steps_ratio=0.1", "trainer.critic_warmup=11"],
            -1,
            -1,
            11,
        ),
    ],
)
def test_warm_ups_of_a_recipe_are_at_most_a_quarter_of_the_run(
    tmp_path, options, actor, critic, critic_alone
):
    data = write_prompts(tmp_path / "train.parquet", 256)
    values = [f"data.train_files={data}", _model(tmp_path / "model", 1000), *options]
    config = fitted(lambda defaults: load_tree(PPO, values, recipe="ppo", defaults=defaults)).config
    found = config.actor_rollout_ref.actor.optim.lr_warmup_steps, config.critic.optim.lr_warmup_steps
    assert (*found, config.trainer.critic_warmup) == (actor, critic, critic_alone)
    author = PPO.author(config, "trainer.critic_warmup")
    assert author.startswith("override" if "critic_warmup" in options[-1] else "derived")


def test_warm_ups_of_a_recipe_of_the_user_stay(tmp_path):
    (tmp_path / "mine.yaml").write_text("trainer: {total_training_steps: 40, critic_warmup: 30}\n")
    values = [f"data.train_files={write_prompts(tmp_path / 'train.parquet', 64)}"]
    config = fitted(
        lambda defaults: load_tree(PPO, values, recipe=tmp_path / "mine.yaml", defaults=defaults)
    ).config
    assert config.trainer.critic_warmup == 30


def test_a_file_of_the_user_is_a_recipe_below_another_file_and_overrides(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("common.yaml").write_text("trainer: {seed: 3, save_freq: 3, total_epochs: 3}\n")
    Path("own.yaml").write_text("trainer: {save_freq: 2, total_epochs: 2}\n")
    config = load_tree(PPO, ["trainer.total_epochs=1"], config_path="own.yaml", recipe="common.yaml")
    assert (config.trainer.seed, config.trainer.save_freq, config.trainer.total_epochs) == (3, 2, 1)
    with pytest.raises(ConfigError, match=r"none\.yaml.*grpo, ppo"):
        load_tree(PPO, recipe="none.yaml")


def test_the_command_takes_a_recipe(tmp_path, capsys):
    data = write_prompts(tmp_path / "train.parquet", 20)
    options = [f"data.train_files={data}", "actor_rollout_ref.model.path=owner/name"]
    assert main(["check", "--config-only", "--full", "--recipe", "grpo", *options]) == 0
    shown = capsys.readouterr().out
    assert "adv_estimator: grpo  # recipe grpo" in shown
    assert "data.train_batch_size=20: the default of 32" in shown
    assert main(["check", "--config-only", "--recipe", "grpo", *options, "data.train_batch_size=64"]) == 2
    assert "data.train_batch_size=20" not in capsys.readouterr().out


def test_a_misspelt_recipe_is_answered_by_the_one_that_is_there(tmp_path, capsys):
    options = ["data.train_files=t.parquet", "actor_rollout_ref.model.path=owner/name"]
    assert main(["train", "--recipe", "grop", *options]) == 2
    assert mentions(capsys.readouterr().err, "grpo, ppo", "did you mean grpo?")
    (tmp_path / "mine.yaml").write_text("trainer: {}")
    assert main(["train", "--recipe", f"{tmp_path}/min.yaml", *options]) == 2
    assert f"did you mean {tmp_path}/mine.yaml?" in capsys.readouterr().err


@pytest.fixture(params=FILES)
def recipe(request, tmp_path, monkeypatch) -> Path:
    """A recipe, in a folder with files where it expects its data."""
    for name in FILES[request.param]:
        path = tmp_path / "data" / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_prompts(path, 200, data_source="openai/gsm8k")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return EXAMPLES / f"{request.param}.yaml"


def test_a_recipe_passes_the_check_without_its_models(recipe, capsys):
    assert main(["check", "--config-only", "--config-path", str(recipe)]) == 0
    assert capsys.readouterr().out.startswith("no errors")


def test_a_recipe_passes_the_whole_check_with_other_models(recipe, tmp_path, capsys):
    tokenizer = tiny_model.build_tokenizer(string.printable)
    tiny_model.build_model(tokenizer, hidden=64).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    models = [f"{key}.model.path={tmp_path / 'model'}" for key in ("actor_rollout_ref", "critic")]
    options = [*models, f"data.cache_dir={tmp_path}", "trainer.logger=[console]"]
    assert main(["check", "--config-path", str(recipe), *options]) == 0
    assert capsys.readouterr().out.startswith("no errors")


def test_the_debug_recipe_has_the_values_of_the_reference():
    config = load_config(config_path=EXAMPLES / "async_debug.yaml")
    plan, policy = check(config).plan, config.actor_rollout_ref
    assert plan is not None
    assert plan.iterations * plan.samples == 32
    assert (config.data.max_response_length, policy.rollout.temperature, policy.actor.optim.lr) == (
        512,
        1,
        3e-7,
    )
    assert (config.algorithm.kl_ctrl.kl_coef, policy.rollout.gpu_memory_utilization) == (0.05, 0.3)
    assert (policy.rollout.name, policy.rollout.enforce_eager, config.trainer.async_steps) == (
        "vllm",
        True,
        1,
    )
    assert config.reward_model.non_stop_penalty
    assert config.reward_model.penalty_reward_value == -10


def test_the_tulu_recipe_has_the_values_of_the_reference():
    config = load_config(config_path=EXAMPLES / "tulu3_ppo_8b.yaml")
    plan, policy, placement = check(config).plan, config.actor_rollout_ref, Placement.from_config(config)
    assert plan is not None
    assert 2_000_000 - plan.samples < plan.iterations * plan.samples <= 2_000_000
    assert (placement.ranks("Actor"), placement.ranks("Rollout")) == (12, 4)
    assert policy.rollout.tensor_model_parallel_size == 4
    per_node = [sum(pool) for pool in zip(*placement.pools.values(), strict=False)]
    assert sum(map(sum, placement.pools.values())) == 16
    assert max(per_node) <= 8
    assert (policy.model.path, config.critic.model.path) == (
        "allenai/Llama-3.1-Tulu-3-8B-DPO",
        "allenai/Llama-3.1-Tulu-3-8B-RM",
    )
    assert (config.data.max_response_length, config.algorithm.kl_ctrl.kl_coef) == (2048, 0.05)
    assert (policy.actor.optim.lr, config.critic.optim.lr) == (3e-7, 3e-7)
    assert config.reward_model.parts["rule"] == 10
    assert not config.reward_model.enable
    assert (config.reward_model.non_stop_penalty, config.reward_model.penalty_reward_value) == (True, -10)


@pytest.mark.parametrize("steps", [0, 1])
def test_the_demo_runs_ahead_with_the_rollout_in_a_separate_pool(tmp_path, steps):
    data = write_prompts(tmp_path / "train.parquet", 200)
    files = [f"data.{key}={data}" for key in ("train_files", "val_files")]
    options = [*demo.asynchronous(steps), *files, "actor_rollout_ref.model.path=owner/name"]
    config = load_config(options, config_path=EXAMPLES / "demo.yaml")
    assert check(config).errors == []
    assert config.trainer.async_steps == steps
    roles = Placement.from_config(config).roles
    expected = ("rollout", "learner") if steps else (None, "global_pool")
    assert (roles.get("Rollout"), roles["Critic"]) == expected


@pytest.mark.parametrize("pools", ["{a: [1], b: [1]}", "{a: [1], b: [2]}", "{a: [1, 1]}"])
def test_pools_of_one_process_fit_into_one_process(pools):
    errors = check(load_config([f"trainer.resource_pools={pools}", "trainer.worker_group=local"])).errors
    refused = any("trainer.worker_group=local is one process" in error for error in errors)
    assert refused == (pools != "{a: [1], b: [1]}")


def test_every_key_of_the_table_of_options_exists():
    text = (EXAMPLES.parent / "docs" / "from_open_instruct.md").read_text()
    sections = "|".join(Config.model_fields)
    keys = set(re.findall(rf"`((?:{sections})\.[a-z_.]+)", text))
    assert len(keys) > 60
    assert keys - all_keys().keys() == set()


def test_the_data_of_the_tulu_recipe_is_converted(tmp_path, monkeypatch, capsys):
    records = [
        {
            "messages": [{"role": "user", "content": f"{kind} {number}", "id": 7}],
            "ground_truth": "5",
            "dataset": kind,
        }
        for number in range(20)
        for kind in ("gsm8k", "MATH", "ifeval")
    ]
    source = tmp_path / "train.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    monkeypatch.setattr("sys.argv", ["tulu3_data", "--source", str(source), "--out", str(tmp_path / "out")])
    tulu3_data.main()
    assert "left out 20 rows of ifeval" in capsys.readouterr().out
    train, val = (
        pq.read_table(tmp_path / "out" / f"{name}.parquet").to_pylist() for name in ("train", "val")
    )
    assert (len(train), len(val)) == (8, 32)
    assert {row["data_source"] for row in train} == {"openai/gsm8k", "lighteval/MATH"}
    assert train[0]["prompt"] == [{"role": "user", "content": "gsm8k 16"}]
    assert train[0]["reward_model"]["ground_truth"] == "5"
