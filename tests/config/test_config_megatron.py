"""Preflight checks of strategy=megatron."""

from __future__ import annotations

import json
from importlib.machinery import ModuleSpec

import numpy as np
import pytest
from safetensors.numpy import save_file

from strop.config.identity import decides_what_is_trained
from strop.config.keys import all_keys
from strop.config.load import load_config
from strop.config.memory.forecast import resident_weights

from messages import mentions

ACTOR = "actor_rollout_ref.actor"
MEGATRON = (f"{ACTOR}.strategy=megatron", "trainer.n_gpus_per_node=8", "trainer.device=cpu")


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: ModuleSpec(name, None, origin=name))


@pytest.fixture
def model(valid, tmp_path):
    """A folder whose configuration has 4 heads, 2 key-value heads and 6 layers."""
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "num_hidden_layers": 6}
    (tmp_path / "model" / "config.json").write_text(json.dumps({**shape, "vocab_size": 19}))


def test_one_key_selects_the_back_end_of_all_roles_and_so_does_the_name_of_verl(valid, installed, report):
    for config in (
        load_config([*valid, *MEGATRON]),
        load_config([*valid, *MEGATRON[1:]], config_name="ppo_megatron_trainer"),
    ):
        assert config.actor_rollout_ref.actor.strategy == config.critic.strategy == "megatron"
    sizes = [f"{ACTOR}.megatron.{key}_model_parallel_size=2" for key in ("tensor", "pipeline")]
    result = report(*MEGATRON, *sizes)
    assert result.errors == []
    assert result.plan.actor.sharing == 4
    config = load_config([*valid, *MEGATRON, *sizes])
    others = (config.critic, config.actor_rollout_ref.ref, config.reward_model)
    assert [section.megatron.tensor_model_parallel_size for section in others] == [2, 2, 2]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["critic.strategy=fsdp"], [f"{ACTOR}.strategy=megatron", "critic.strategy=fsdp"]),
        ([f"{ACTOR}.megatron.tensor_model_parallel_size=3"], ["=3", "8 ranks"]),
        (
            [f"{ACTOR}.megatron.tensor_model_parallel_size=4"],
            ["=4", "4 attention heads", "2 key-value heads"],
        ),
        ([f"{ACTOR}.megatron.pipeline_model_parallel_size=4"], ["6 layers", "4 stages"]),
        (
            ["critic.megatron.tensor_model_parallel_size=2"],
            ["critic.megatron", f"{ACTOR}.megatron", "(2, 1, None, 1)", "(1, 1, None, 1)", "pool"],
        ),
        ([f"{ACTOR}.megatron.context_parallel_size=2"], ["context_parallel_size=2", "ulysses"]),
        ([f"{ACTOR}.megatron.expert_model_parallel_size=2"], ["=2", "no routed experts"]),
        ([f"{ACTOR}.megatron.expert_model_parallel_size=3"], ["=3", "8 ranks of a pipeline stage"]),
        ([f"{ACTOR}.megatron.expert_tensor_parallel_size=2"], ["expert_tensor_parallel_size=2", "null"]),
        ([f"{ACTOR}.megatron.param_offload=True"], ["param_offload=True", "False"]),
        ([f"{ACTOR}.megatron.use_dist_checkpointing=True"], ["use_dist_checkpointing=True"]),
        ([f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size=2"], ["=2", "null"]),
        (
            [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=full"],
            ["kl_loss_type=full", f"{ACTOR}.strategy=megatron", "only fsdp"],
        ),
        (
            ["actor_rollout_ref.model.lora_rank=8"],
            ["actor_rollout_ref.model.lora_rank=8", f"{ACTOR}.strategy=megatron", "fsdp"],
        ),
        (
            ["critic.model.lora_adapter_path=gone"],
            ["critic.model.lora_adapter_path=gone", "critic.strategy=megatron", "fsdp"],
        ),
        (
            ["actor_rollout_ref.model.freeze=[encoder]"],
            ["actor_rollout_ref.model.freeze=['encoder']", f"{ACTOR}.strategy=megatron", "only fsdp"],
        ),
    ],
)
def test_what_does_not_fit_is_an_error_by_name(installed, model, report, overrides, words):
    assert report(*MEGATRON).errors == []
    errors = report(*MEGATRON, *overrides).errors
    assert any(mentions(line, *words) for line in errors), errors


def test_a_layout_of_teachers_is_checked_as_that_of_other_models(installed, model, report, tmp_path):
    """In the actor's pool it has the actor's sizes, which divide the heads of every teacher."""
    (tmp_path / "teacher").mkdir()
    shape = {"num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 32, "num_hidden_layers": 6}
    (tmp_path / "teacher" / "config.json").write_text(json.dumps({**shape, "vocab_size": 19}))
    run = (*MEGATRON, "teacher.kl=sampled", f"{ACTOR}.megatron.tensor_model_parallel_size=2")
    one, alike = f"teacher.model.path={tmp_path}/teacher", f"teacher.model.path={tmp_path}/model"
    several = f"teacher.by_source={{math: {{model: {{path: {tmp_path}/teacher}}}}}}"
    assert report(*run, alike).errors == []
    for teacher in (one, several):
        [line] = report(*run, teacher).errors
        assert mentions(line, "teacher.megatron.tensor_model_parallel_size=2", "1 key-value heads", "teacher")
    [line] = report(*run, alike, "teacher.megatron.tensor_model_parallel_size=1").errors
    assert mentions(line, "teacher.megatron", f"{ACTOR}.megatron", "(2, 1, None, 1)", "(1, 1, None, 1)")
    servers = ("teacher.servers=[http://127.0.0.1:1]", "teacher.megatron.tensor_model_parallel_size=1")
    assert report(*run, *servers).errors == []  # they have no layout of the run


def test_experts_must_divide_and_the_forecast_counts_whose_they_are(valid, installed, report, tmp_path):
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "num_hidden_layers": 6}
    content = {**shape, "vocab_size": 19, "num_experts": 6}
    (tmp_path / "model" / "config.json").write_text(json.dumps(content))
    tensors = {
        "model.layers.0.mlp.experts.0.up_proj.weight": np.zeros((8, 100), np.float32),
        "lm_head.weight": np.zeros((2, 100), np.float32),
    }
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    sizes = [f"{ACTOR}.megatron.{key}_model_parallel_size=2" for key in ("tensor", "expert")]
    assert report(*MEGATRON, *sizes).errors == []
    errors = report(*MEGATRON, f"{ACTOR}.megatron.expert_model_parallel_size=4").errors
    assert any(mentions(line, "=4", "6 routed experts") for line in errors)
    errors = report(*MEGATRON, *sizes, f"{ACTOR}.megatron.sequence_parallel=False").errors
    assert any(mentions(line, "sequence_parallel=False", "experts") for line in errors)
    held = resident_weights(load_config([*valid, *MEGATRON, *sizes]))
    # weights and gradients over 2 ranks, dense ones and experts alike; moments over all 8
    assert held["actor: weights, gradients, AdamW"] == 1000 * 8 // 2 + 1000 * 8 // 8
    held = resident_weights(load_config([*valid, *MEGATRON, sizes[0]]))
    assert held["reference: weights"] == 200 * 4 // 2 + 800 * 4  # experts are not cut


def test_a_missing_package_is_an_error_that_names_the_extra(monkeypatch, report):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert any(mentions(line, "strop[megatron]") for line in report(*MEGATRON).errors)


def test_keys_of_the_other_back_end_have_no_effect(installed, report):
    written = (f"{ACTOR}.fsdp_config.fsdp_size=2", f"{ACTOR}.ulysses_sequence_parallel_size=2")
    warnings = report(*MEGATRON, *written).warnings
    assert all(any(mentions(line, "strategy=megatron", key) for line in warnings) for key in written)
    [line] = report(f"{ACTOR}.megatron.tensor_model_parallel_size=2").warnings
    assert mentions(line, "strategy=fsdp", "only megatron", "tensor_model_parallel_size=2")


def test_keys_that_one_back_end_lacks_are_named(installed, report):
    keys = ("actor_rollout_ref.model.use_remove_padding=False", "critic.model.use_remove_padding=False")
    found = report(*MEGATRON, *keys).warnings
    assert all(any(mentions(line, key, "strategy=megatron", "only fsdp") for line in found) for key in keys)
    assert report(*keys).warnings == []
    vllm, key = "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.load_format"
    for options, other, own in (
        ((vllm,), ("dummy_megatron",), ("auto", "megatron", "dtensor", "dummy_dtensor", "hf", "dummy_hf")),
        ((vllm, *MEGATRON), ("dummy_dtensor",), ("auto", "dtensor", "megatron", "dummy_megatron", "hf")),
    ):
        for value in (*other, *own):
            named = [line for line in report(*options, f"{key}={value}").warnings if f"{key}={value}" in line]
            assert len(named) == (value in other)


def test_the_layout_of_a_reward_model_that_is_off_has_no_effect(installed, report):
    key = "reward_model.megatron.tensor_model_parallel_size=2"
    assert any(mentions(line, key, "reward_model.enable=False") for line in report(*MEGATRON, key).warnings)
    refused = report(*MEGATRON, f"{ACTOR}.megatron.param_offload=True").errors
    assert not any(mentions(line, "reward_model") for line in refused)


def test_the_forecast_of_a_pool_counts_the_layout_and_the_distributed_optimizer(valid, installed, tmp_path):
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "num_hidden_layers": 6}
    (tmp_path / "model" / "config.json").write_text(json.dumps({**shape, "vocab_size": 19}))
    save_file({"weight": np.zeros((40, 100), np.float32)}, tmp_path / "model" / "model.safetensors")
    pools = ("trainer.resource_pools={one: [4], two: [2]}", "trainer.placement={Critic: two}")
    sizes = (f"{ACTOR}.megatron.tensor_model_parallel_size=2", "trainer.device=cpu")
    config = load_config([*valid, MEGATRON[0], *pools, *sizes])
    # weights and gradients over the 2 ranks of a copy, moments over all ranks of the pool
    held = resident_weights(config, "one")
    assert held["actor: weights, gradients, AdamW"] == 4000 * 8 // 2 + 4000 * 8 // 4
    assert held["reference: weights"] == 4000 * 4 // 2
    assert resident_weights(config, "two") == {
        "critic: weights, gradients, AdamW": 4000 * 8 // 2 + 4000 * 8 // 2
    }
    whole = load_config(
        [*valid, MEGATRON[0], *pools, *sizes, f"{ACTOR}.megatron.use_distributed_optimizer=False"]
    )
    assert resident_weights(whole, "one")["actor: weights, gradients, AdamW"] == 4000 * 16 // 2


def test_another_layout_continues_a_run():
    keys = all_keys()
    assert not decides_what_is_trained(keys["reward_model.megatron.tensor_model_parallel_size"])
    assert not decides_what_is_trained(keys[f"{ACTOR}.megatron.pipeline_model_parallel_size"])
    assert decides_what_is_trained(keys["reward_model.model.path"])
