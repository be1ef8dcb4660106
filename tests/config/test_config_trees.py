"""The trees of all trainers: schema and YAML agree; the supervised ones in detail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strop.config.checks.check import check
from strop.config.keys import all_keys
from strop.config.load import load_config, load_tree, to_yaml, written_paths
from strop.config.schema.supervised import SupervisedConfig
from strop.config.trees import DPO, PPO, REWARD_MODELLING, SFT
from strop.errors import ConfigError

from messages import mentions, naming

TREES = pytest.mark.parametrize("tree", [SFT, REWARD_MODELLING, DPO], ids=lambda tree: tree.name)


@pytest.mark.parametrize("tree", [PPO, SFT, REWARD_MODELLING, DPO], ids=lambda tree: tree.name)
def test_schema_and_defaults_hold_the_same_keys_and_each_is_documented_in_one_line(tree):
    defaults = written_paths(tree.raw_defaults())
    keys = all_keys(tree.schema)
    assert defaults == set(keys)
    undocumented = [
        key.path for key in keys.values() if not key.doc.strip() or "\n" in key.doc or not key.expected
    ]
    assert undocumented == []


def test_short_names_stand_for_keys_of_their_tree():
    assert PPO.short == {
        "model": "actor_rollout_ref.model.path",
        "data": "data.train_files",
        "reward": "custom_reward_function.path",
        "algorithm": "algorithm.adv_estimator",
        "lr": "actor_rollout_ref.actor.optim.lr",
        "steps": "trainer.total_training_steps",
        "n": "actor_rollout_ref.rollout.n",
        "out": "trainer.default_local_dir",
    }
    for tree in (SFT, REWARD_MODELLING, DPO):
        assert tree.short == {
            "model": "model.path",
            "data": "data.train_files",
            "lr": "update.optim.lr",
            "steps": "trainer.total_training_steps",
            "out": "trainer.default_local_dir",
        }


@TREES
def test_a_file_is_laid_over_the_defaults_and_a_resolved_one_is_read_back_equal(tree, tmp_path):
    config = load_tree(tree, ["update.optim.lr=3e-4", "trainer.experiment_name=mine"])
    (tmp_path / "mine.yaml").write_text(to_yaml(config))
    assert load_tree(tree, config_path=tmp_path / "mine.yaml") == config
    (tmp_path / "mine.yaml").write_text(f"defaults: [{tree.name}, _self_]\nupdate: {{grad_clip: 0.5}}\n")
    assert load_tree(tree, config_path=tmp_path, config_name="mine").update.grad_clip == 0.5


def test_keys_of_another_tree_are_unknown():
    with pytest.raises(ConfigError, match=naming("algorithm")):
        load_tree(SFT, ["algorithm.gamma=1"])
    with pytest.raises(ConfigError, match=naming("update")):
        load_config(["update.grad_clip=1"])
    assert "algorithm.gamma" in all_keys()


def test_numbers_of_processes_that_do_not_fit_are_errors():
    settings = ("trainer.worker_group=local", "trainer.n_gpus_per_node=4", "model.fsdp_config.fsdp_size=3")
    config = load_tree(SFT, settings)
    assert isinstance(config, SupervisedConfig)
    with pytest.raises(ConfigError) as caught:
        check(config).raise_errors()
    assert mentions(str(caught.value), "trainer.worker_group=local", "4")
    assert mentions(str(caught.value), "fsdp_size=3", "4")


@pytest.fixture(params=[SFT, REWARD_MODELLING, DPO], ids=lambda tree: tree.name)
def warnings(request, tmp_path):
    """The warnings about a run that could start, of a model made for 2048 tokens."""
    files = [f"data.{key}={tmp_path}/{key}.parquet" for key in ("train_files", "val_files")]
    for file in files:
        Path(file.partition("=")[2]).touch()
    shape = {
        "vocab_size": 100, "max_position_embeddings": 2048, "hidden_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    one_process = (f"model.path={tmp_path}", "trainer.n_gpus_per_node=1", "trainer.device=cpu")

    def run(*overrides):
        result = check(load_tree(request.param, [*files, *one_process, *overrides]))
        result.raise_errors()
        return result.warnings

    return run


DOUBTFUL = [
    (["update.optim.total_training_steps=77"], ["no effect", "update.optim.total_training_steps"]),
    (
        ["update.micro_batch_size_per_gpu=4", "update.max_token_len_per_gpu=3000"],
        ["no effect", "update.max_token_len_per_gpu"],
    ),
    (["model.fsdp_config.param_offload=True"], ["no effect", "model.fsdp_config.param_offload"]),
    (["model.fsdp_config.grad_offload=True"], ["no effect", "model.fsdp_config.grad_offload"]),
    (["model.fsdp_config.fsdp_size=4"], ["no effect", "model.fsdp_config.fsdp_size"]),
    (
        ["model.fsdp_config.wrap_policy.min_num_params=10"],
        ["no effect", "model.fsdp_config.wrap_policy.min_num_params"],
    ),
    (["trainer.max_restarts=3"], ["no effect", "trainer.max_restarts"]),
    (["trainer.phase_timeout_s=5"], ["no effect", "trainer.phase_timeout_s"]),
    (["trainer.async_save=True", "trainer.save_minutes=null"], ["no effect", "trainer.async_save"]),
    (
        ["update.use_dynamic_bsz=True", "update.micro_batch_size_per_gpu=4"],
        ["cut by tokens", "update.micro_batch_size_per_gpu=4"],
    ),
    (
        ["update.optim.warmup_style=constant", "update.optim.min_lr_ratio=0.5"],
        ["update.optim.min_lr_ratio=0.5", "warmup_style=constant"],
    ),
    (
        ["data.val_files=[]", "trainer.test_freq=5", "trainer.val_before_train=True"],
        ["data.val_files", "trainer.test_freq", "trainer.val_before_train"],
    ),
    (["data.max_prompt_length=200000"], ["200512", "2048"]),
]


@pytest.mark.parametrize(("overrides", "parts"), DOUBTFUL)
def test_doubtful_settings_are_one_warning_each(warnings, overrides, parts):
    (line,) = warnings(*overrides)
    assert mentions(line, *parts)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["update.micro_batch_size_per_gpu=2", "trainer.test_freq=1"],
        ["update.use_dynamic_bsz=True", "update.max_token_len_per_gpu=4096"],
        ["trainer.save_freq=1", "trainer.async_save=True", "update.optim.min_lr_ratio=0.5"],
        ["data.val_files=[]"],
    ],
)
def test_a_run_without_such_settings_has_no_warnings(warnings, overrides):
    assert warnings(*overrides) == []


def test_flex_attention_on_a_cpu_and_megatron_are_refused(warnings):
    with pytest.raises(ConfigError, match=naming("model.attn_implementation=flex_attention", "GPU")):
        warnings("model.use_remove_padding=True", "model.attn_implementation=flex_attention")
    dropout = "model.override_config={attention_dropout: 0.1}"
    with pytest.raises(ConfigError, match=naming("flex_attention", "attention_dropout", "sdpa")):
        warnings("trainer.device=cuda", dropout, "model.attn_implementation=flex_attention")
    with pytest.raises(ConfigError, match=naming("update.strategy=megatron", "fsdp", "given answers")):
        warnings("update.strategy=megatron")
