"""Whole runs with LoRA adapters, from the configuration to the exported folder."""

from __future__ import annotations

import importlib.util
import json
import shutil

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from strop.checkpoint.export import export
from strop.cli.main import main
from strop.config.checks.check import check
from strop.config.load import load_config
from strop.engines.base import weights_hash
from strop.errors import CheckpointError

import runs
import supervised_runs
from messages import naming

needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="needs peft: pip install 'strop[peft]'"
)
ACTOR = "actor_rollout_ref.model"
LORA = (f"{ACTOR}.lora_rank=4", "critic.model.lora_rank=4", "actor_rollout_ref.actor.use_kl_loss=True")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return runs.make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return supervised_runs.make_inputs(tmp_path_factory.mktemp("answers"))


def ppo(inputs, run, *extra):
    critic = f"critic.model.path={inputs / 'model'}"
    return runs.train(runs.overrides(inputs, run, *LORA, critic, "trainer.save_freq=1", *extra))


@needs_peft
def test_the_reference_is_the_actor_and_a_resume_is_exact(inputs, tmp_path):
    whole = ppo(inputs, tmp_path / "whole")
    assert list(whole.groups) == ["actor", "critic"]
    assert whole.ref is whole.actor
    ppo(inputs, tmp_path / "cut", "trainer.total_training_steps=1")
    assert runs.hashes(ppo(inputs, tmp_path / "cut")) == runs.hashes(whole)
    apart = ppo(inputs, tmp_path / "apart", "trainer.placement={RefPolicy: global_pool}")
    assert list(apart.groups) == ["actor", "ref", "critic"]
    assert runs.hashes(apart) == runs.hashes(whole)
    assert [line["actor/kl_loss"] for line in runs.metrics(tmp_path / "apart")[-2:]] == [
        line["actor/kl_loss"] for line in runs.metrics(tmp_path / "whole")[-2:]
    ]
    checkpoint = tmp_path / "whole" / "global_step_2"
    assert main(["export", str(checkpoint), "--merge", "--out", str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert weights_hash(merged.named_parameters()) == whole.actor.weights_hash()
    for role in ("actor", "critic"):
        adapter = export(checkpoint, tmp_path / role, role=role)
        assert not list(adapter.glob("model*.safetensors"))


@needs_peft
@pytest.mark.parametrize("kind", ["sft", "train-rm", "dpo"])
def test_supervised_runs_export_an_adapter_or_the_merged_model(answers, tmp_path, kind):
    options = ["model.lora_rank=4", "trainer.total_training_steps=2"]
    supervised_runs.train(kind, supervised_runs.overrides(answers, tmp_path / "run", *options))
    final = tmp_path / "run" / "final_model"
    assert json.loads((final / "adapter_config.json").read_text())["r"] == 4
    supervised_runs.train(
        kind, supervised_runs.overrides(answers, tmp_path / "merged", *options, "model.lora_merge=True")
    )
    assert main(["export", str(final), "--merge", "--out", str(tmp_path / "by command")]) == 0
    merged = load_file(tmp_path / "merged" / "final_model" / "model.safetensors")
    by_command = load_file(tmp_path / "by command" / "model.safetensors")
    assert merged.keys() == by_command.keys()
    assert all(by_command[name].equal(weight) for name, weight in merged.items())


@needs_peft
def test_the_reference_of_dpo_is_the_base_of_an_adapter_that_is_trained_further(answers, tmp_path):
    options = ["model.lora_rank=4", "trainer.total_training_steps=2"]
    supervised_runs.train("dpo", supervised_runs.overrides(answers, tmp_path / "first", *options))
    adapter = tmp_path / "first" / "final_model"
    further = [f"model.lora_adapter_path={adapter}", "trainer.total_training_steps=2"]
    supervised_runs.train("dpo", supervised_runs.overrides(answers, tmp_path / "second", *further))
    first, second = (
        load_file(tmp_path / run / "reference_log_probs" / "val.safetensors") for run in ("first", "second")
    )
    assert all(first[name].equal(second[name]) for name in first)


def problems(inputs, *extra):
    found = check(load_config(runs.overrides(inputs, inputs / "run", *extra)))
    return found.errors, found.warnings


def test_wrong_adapters_are_found_before_a_model_is_loaded(inputs, tmp_path):
    lora = f"{ACTOR}.lora_rank=4"
    rate = "actor_rollout_ref.actor.optim.lr=1e-6"
    assert any("1e-06" in line and "docs/lora.md" in line for line in problems(inputs, lora, rate)[1])
    assert not any("docs/lora.md" in line for line in problems(inputs, rate)[1])
    unread = problems(inputs, f"{ACTOR}.lora_alpha=8")[1]
    assert any("lora_alpha" in line for line in unread)
    missing = problems(inputs, f"{ACTOR}.lora_adapter_path={tmp_path / 'gone'}")[0]
    assert any("lora_adapter_path" in line and "no such folder" in line for line in missing)
    quantized = shutil.copytree(inputs / "model", tmp_path / "quantized")
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (quantized / "config.json").write_text(json.dumps(config))
    errors = problems(inputs, lora, f"{ACTOR}.path={quantized}")[0]
    assert any("bitsandbytes" in line and "QLoRA" in line for line in errors)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "the/base"}')
    errors = problems(inputs, f"{ACTOR}.path={tmp_path / 'adapter'}")[0]
    assert any(f"{ACTOR}.path=the/base" in line and "lora_adapter_path" in line for line in errors)


def test_there_is_nothing_to_merge_in_a_model(inputs, tmp_path):
    options = runs.overrides(
        inputs, tmp_path / "run", "trainer.save_freq=1", "trainer.total_training_steps=1"
    )
    runs.train([*options, "algorithm.adv_estimator=grpo"])
    with pytest.raises(CheckpointError, match=naming("no LoRA adapter")):
        export(tmp_path / "run" / "global_step_1", tmp_path / "out", merge=True)
