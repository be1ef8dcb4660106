"""Whole runs with LoRA adapters, from the configuration to the exported folder."""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import strop
from strop.checkpoint.export import export
from strop.cli.main import main
from strop.config.checks.check import check
from strop.config.load import load_config
from strop.engines.base import weights_hash

import forked
import runs
import supervised_runs
from killing import SETTINGS, kill

needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="needs peft: pip install 'strop[peft]'"
)
ACTOR = "actor_rollout_ref.model"
LORA = (
    f"{ACTOR}.lora_rank=4",
    f"{ACTOR}.modules_to_save=[embed_tokens,norm]",
    "critic.model.lora_rank=4",
    "actor_rollout_ref.actor.use_kl_loss=True",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return runs.make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return supervised_runs.make_inputs(tmp_path_factory.mktemp("answers"))


def ppo(inputs, run, *extra):
    critic = f"critic.model.path={inputs / 'model'}"
    return runs.train(runs.overrides(inputs, run, *LORA, critic, "trainer.save_freq=1", *extra))


@pytest.fixture(scope="module")
def undisturbed(inputs):
    run = inputs / "undisturbed"
    return run, ppo(inputs, run)


@needs_peft
def test_the_reference_is_the_actor_and_a_checkpoint_holds_adapters_to_merge(undisturbed, tmp_path):
    run, trainer = undisturbed
    assert list(trainer.groups) == ["actor", "critic"]
    assert trainer.ref is trainer.actor
    assert runs.metrics(run)[-1]["actor/kl_loss"] > 0
    checkpoint = run / "global_step_2"
    assert main(["export", str(checkpoint), "--merge", "--out", str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert weights_hash(merged.named_parameters()) == trainer.actor.weights_hash()
    for role in ("actor", "critic"):
        adapter = export(checkpoint, tmp_path / role, role=role)
        assert not list(adapter.glob("model*.safetensors"))


@needs_peft
@pytest.mark.slow
def test_a_reference_of_its_own_has_the_same_figures(inputs, undisturbed, tmp_path):
    run, expected = undisturbed
    apart = ppo(inputs, tmp_path, "trainer.placement={RefPolicy: global_pool}")
    assert list(apart.groups) == ["actor", "ref", "critic"]
    assert runs.hashes(apart) == runs.hashes(expected)
    assert runs.metrics(tmp_path) == runs.metrics(run)


@needs_peft
@pytest.mark.slow
@pytest.mark.parametrize(("point", "iteration"), [("update", 3), ("save critic", 2), ("rename", 3)])
def test_a_killed_run_continues_to_the_same_numbers(inputs, tmp_path, point, iteration):
    lora = (*LORA, f"critic.model.path={inputs / 'model'}", *SETTINGS)
    expected = runs.hashes(runs.train(runs.overrides(inputs, tmp_path / "whole", *lora)))
    options = runs.overrides(inputs, tmp_path / "killed", *lora)
    kill(point, iteration, options)
    latest = (tmp_path / "killed" / "latest_checkpointed_iteration.txt").read_text()
    assert latest == f"{iteration - 1}\n"
    assert runs.hashes(runs.train(options)) == expected
    assert runs.metrics(tmp_path / "killed") == runs.metrics(tmp_path / "whole")


@needs_peft
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "train-rm", "dpo"])
def test_a_killed_supervised_run_continues_to_the_same_numbers(answers, tmp_path, kind):
    lora = ("model.lora_rank=4", "model.modules_to_save=[embed_tokens]", "trainer.save_freq=1")
    supervised_runs.train(kind, supervised_runs.overrides(answers, tmp_path / "whole", *lora))
    options = supervised_runs.overrides(answers, tmp_path / "killed", *lora)
    done = forked.run(supervised_runs.train, kind, options, env={"STROP_CRASH_AT": "log:3"})
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    supervised_runs.train(kind, options)
    role = "reward_model" if kind == "train-rm" else "actor"
    adapter = f"global_step_4/{role}/huggingface/adapter_model.safetensors"
    whole, killed = (load_file(tmp_path / run / adapter) for run in ("whole", "killed"))
    assert whole.keys() == killed.keys()
    assert all(killed[name].equal(weight) for name, weight in whole.items())


@needs_peft
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "train-rm", "dpo"])
def test_supervised_runs_export_an_adapter_or_the_merged_model(answers, tmp_path, kind):
    options = ["model.lora_rank=4", "model.modules_to_save=[norm]", "trainer.total_training_steps=2"]
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
    model = strop.Run(tmp_path / "run").model()[0].state_dict()
    assert all(model[name].equal(weight) for name, weight in merged.items())


@needs_peft
@pytest.mark.slow
def test_the_reference_of_dpo_is_the_base_of_an_adapter_that_is_trained_further(answers, tmp_path):
    options = ["model.lora_rank=4", "model.modules_to_save=[norm]", "trainer.total_training_steps=2"]
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
    assert any("1e-06" in line and "LoRA" in line for line in problems(inputs, lora, rate)[1])
    assert not any("LoRA" in line for line in problems(inputs, rate)[1])
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
    config = {**config, "quantization_config": None, "num_experts": 4}
    (quantized / "config.json").write_text(json.dumps(config))
    errors = problems(inputs, lora, f"{ACTOR}.path={quantized}")[0]
    assert any("routed experts" in line and f"{ACTOR}.target_modules=[q_proj," in line for line in errors)
    errors = problems(inputs, lora, f"{ACTOR}.modules_to_save=[embed_tokens,lm_head,norm,nonesuch]")[0]
    assert [line for line in errors if "modules_to_save" in line and "ends in nonesuch" in line] == errors
    assert any("modules_to_save" in line for line in problems(inputs, f"{ACTOR}.modules_to_save=[norm]")[1])
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "the/base"}')
    errors = problems(inputs, f"{ACTOR}.path={tmp_path / 'adapter'}")[0]
    assert any(f"{ACTOR}.path=the/base" in line and "lora_adapter_path" in line for line in errors)
    assert any("strop dpo is then that base model" in line for line in errors)
