"""Models whose tokens or attention are not what a run needs are refused before any of them is loaded."""

from __future__ import annotations

import json
import shutil
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from strop.config.checks.check import check
from strop.config.load import load_config, load_tree
from strop.config.memory.facts import read_model_facts
from strop.config.trees import SFT
from strop.controller.pools import Role
from strop.errors import ModelError, StropError
from strop.models.folder import load_tokenizer, words_of
from strop.models.loader import load_model_config
from strop.trainer.build import build_trainer, end_ids
from strop.trainer.supervised import SftTrainer, build
from strop.workers.reward_model import RewardModelWorker

import tiny_model
from messages import mentions, naming
from runs import make_inputs, overrides

ATTENTION = "actor_rollout_ref.model.attn_implementation"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A policy, the same with other characters, and one with a cap of attention scores."""
    inputs = make_inputs(tmp_path_factory.mktemp("inputs"))
    ours = tiny_model.CHARACTERS
    for name, characters in {
        "larger": f"{ours}X",
        "smaller": ours[:-1],
        "swapped": f"1{ours[0]}{ours[2:]}",
    }.items():
        tokenizer = tiny_model.build_tokenizer(characters)
        tiny_model.build_model(tokenizer, hidden=32).save_pretrained(inputs / name)
        tokenizer.save_pretrained(inputs / name)
    size = {"vocab_size": 19, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    capped = Gemma2Config(**size, **heads, attn_logit_softcapping=5.0)
    Gemma2ForCausalLM(capped).save_pretrained(inputs / "capped")
    tiny_model.build_tokenizer().save_pretrained(inputs / "capped")
    return inputs


@pytest.fixture
def refusal(inputs, tmp_path):
    """The error of a run with these settings; empty without one."""

    def refusal(*options):
        try:
            trainer = build_trainer(load_config(overrides(inputs, tmp_path, *options)))
        except StropError as error:
            return f"{type(error).__name__}: {error}"
        trainer.reward_fn.close()
        trainer.val_reward_fn.close()
        return ""

    return refusal


_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123\n"


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (None, ("no weights",)),
        (_POINTER.encode(), ("model.safetensors is a pointer of git-lfs", "git lfs pull")),
        (b"", ("model.safetensors cannot be read",)),
        ("half", ("model.safetensors cannot be read",)),
        ("shard", ("model-00002-of-00002.safetensors is missing",)),
    ],
)
def test_a_download_that_is_not_whole(inputs, refusal, tmp_path, content, parts):
    model = tmp_path / "part"
    shutil.copytree(inputs / "model", model)
    weights = model / "model.safetensors"
    if content is None:
        weights.unlink()
    elif content == "half":
        weights.write_bytes(weights.read_bytes()[:5000])
    elif content == "shard":
        weights.rename(model / "model-00001-of-00002.safetensors")
        index = {"weight_map": {name: f"model-0000{name}-of-00002.safetensors" for name in "12"}}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        weights.write_bytes(content)
    assert mentions(refusal(f"actor_rollout_ref.model.path={model}"), "ModelError", model, *parts)


def test_files_that_transformers_does_not_read_may_be_missing(inputs, refusal, tmp_path):
    model = tmp_path / "saved again"
    shutil.copytree(inputs / "model", model)
    # save_pretrained removes shards of an earlier save, and leaves their index
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "consolidated.safetensors").write_text(_POINTER)  # git lfs pull --include 'model*'
    assert refusal(f"actor_rollout_ref.model.path={model}") == ""
    AutoModelForCausalLM.from_pretrained(model)
    shutil.copy(model / "model.safetensors", model / "consolidated.safetensors")
    assert read_model_facts(str(model)) == read_model_facts(str(inputs / "model"))


def test_a_critic_with_another_vocabulary(inputs, refusal):
    key = "critic.model.path"
    assert mentions(refusal(f"{key}={inputs / 'smaller'}"), key, "19 tokens", "18 tokens")
    assert refusal(f"{key}={inputs / 'larger'}") == ""  # the same ids, and a row to spare
    assert mentions(refusal(f"{key}={inputs / 'swapped'}"), key, "2 ids", "4", "'0'", "'1'")
    (inputs / "swapped" / "tokenizer.json").rename(inputs / "away")
    (inputs / "swapped" / "tokenizer_config.json").rename(inputs / "away too")
    assert refusal(f"{key}={inputs / 'swapped'}", f"critic.model.tokenizer_path={inputs / 'model'}") == ""
    (inputs / "away").rename(inputs / "swapped" / "tokenizer.json")
    (inputs / "away too").rename(inputs / "swapped" / "tokenizer_config.json")
    assert refusal(f"{key}={inputs / 'smaller'}", "algorithm.adv_estimator=grpo") == ""  # no critic


def test_a_reward_model_with_a_vocabulary_of_another_size(inputs, refusal, tmp_path):
    key = "reward_model.model.path"
    for name, size in {"smaller": 18, "larger": 20}.items():
        options = ["reward_model.enable=true", f"{key}={inputs / name}"]
        shared = [*options, "reward_model.model.input_tokenizer=null"]
        assert mentions(refusal(*shared), "ModelError", key, "19 tokens", f"{size} tokens", "input_tokenizer")
        assert refusal(*options) == ""  # it has a tokenizer of its own
        worker = RewardModelWorker(load_config(overrides(inputs, tmp_path, *shared)), Role.RewardModel)
        with pytest.raises(ValueError, match=f"{size} tokens"):  # of a program that builds no trainer
            worker.init_model()


def test_a_tokenizer_of_another_policy(inputs, refusal):
    swapped = refusal(f"data.tokenizer={inputs / 'swapped'}")
    assert mentions(swapped, "actor_rollout_ref.model.path", "2 ids", "'0'", "data.tokenizer")
    larger = refusal(f"data.tokenizer={inputs / 'larger'}")
    assert mentions(larger, "actor_rollout_ref.model.path", "19 tokens", "19", "data.tokenizer")
    assert "critic" not in larger


def test_a_tokenizer_of_another_model_in_supervised_training(inputs, tmp_path):
    options = [
        f"model.path={inputs / 'model'}",
        f"data.tokenizer={inputs / 'swapped'}",
        f"data.train_files={inputs / 'train.parquet'}",
        f"trainer.default_local_dir={tmp_path}",
    ]
    with pytest.raises(StropError) as caught:
        build(SftTrainer, load_tree(SFT, options))
    assert mentions(caught.value, "model.path", "2 ids", "data.tokenizer")


def test_attention_that_would_drop_a_cap(inputs, refusal, caplog):
    capped = f"actor_rollout_ref.model.path={inputs / 'capped'}"
    named = refusal(capped, f"{ATTENTION}=sdpa", "critic.model.attn_implementation=null")
    assert mentions(named, "ConfigError", f"{ATTENTION}=sdpa", "attn_logit_softcapping=5.0", "eager")
    assert "critic" not in named
    critic = refusal(capped, "critic.model.attn_implementation=sdpa")
    assert mentions(critic, "ConfigError", "critic.model.attn_implementation=sdpa")
    assert f"{ATTENTION}=sdpa" not in critic
    caplog.clear()
    assert refusal(capped, "algorithm.adv_estimator=grpo") == ""
    (line,) = [record.getMessage() for record in caplog.records if "eager" in record.getMessage()]
    assert mentions(line, "actor_rollout_ref.model", "attn_logit_softcapping=5.0", "sdpa")


def test_what_only_a_gpu_computes_is_refused_before_models_load(refusal, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: ModuleSpec(name, None, origin=name))
    monkeypatch.setattr(torch.cuda, "current_device", mock.Mock(side_effect=AssertionError("no CUDA")))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    strategy = "actor_rollout_ref.actor.strategy=megatron"
    assert mentions(refusal(strategy), "ConfigError", "strategy=megatron", "GPUs", "fsdp")
    local = "trainer.worker_group=local"
    assert mentions(refusal("trainer.device=cuda", local), "ConfigError", "trainer.device=cuda", "cpu")


def test_heads_that_vllm_lacks_on_a_cpu_are_refused_by_the_check(inputs, tmp_path):
    options = overrides(inputs, tmp_path, "actor_rollout_ref.rollout.name=vllm")
    (wrong,) = [line for line in check(load_config(options)).errors if "heads of 32" in line]
    assert mentions(wrong, "vLLM's attention", "have 16", "rollout.name=hf")
    options = [*options, "trainer.device=cuda"]
    assert not any("heads of 32" in line for line in check(load_config(options)).errors)


@pytest.mark.parametrize("special", [False, True])
def test_tokens_beyond_the_embedding(inputs, refusal, tmp_path, special):
    ours = tiny_model.build_tokenizer()
    size = len(ours)
    ours.add_tokens(["<new>"], special_tokens=special)
    ours.save_pretrained(tmp_path / "added")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "added" / name).write_bytes((inputs / "model" / name).read_bytes())
    found = refusal(f"actor_rollout_ref.model.path={tmp_path / 'added'}")
    assert found.startswith("ModelError")
    assert mentions(found, f"has {size} tokens", f"up to {size}", "<new>", "resize_token_embeddings")
    scores = (
        "reward_model.enable=True", f"reward_model.model.path={tmp_path / 'added'}",
        f"reward_model.model.input_tokenizer={inputs / 'model'}",
    )  # fmt: skip
    assert mentions(refusal(*scores), "reward_model.model.path", "<new>")
    options = [f"model.path={tmp_path / 'added'}", f"data.train_files={inputs / 'train.parquet'}"]
    where = [f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.device=cpu"]
    with pytest.raises(ModelError, match=naming("model.path", "<new>")):
        build(SftTrainer, load_tree(SFT, [*options, *where]))


def test_a_placeholder_of_pictures_needs_no_row(inputs, refusal, tmp_path):
    """Gemma 3's text models have their family's tokenizer; no output layer makes the placeholder."""
    shutil.copytree(inputs / "model", tmp_path / "text")
    tokenizer = load_tokenizer(tmp_path / "text")
    tokenizer.add_tokens(["<image_soft_token>"], special_tokens=True)
    tokenizer.save_pretrained(tmp_path / "text")
    written = json.loads((tmp_path / "text" / "tokenizer_config.json").read_text())
    written["image_token"] = "<image_soft_token>"
    (tmp_path / "text" / "tokenizer_config.json").write_text(json.dumps(written))
    rows = load_model_config(tmp_path / "text").vocab_size
    again = load_tokenizer(tmp_path / "text")
    assert again.convert_tokens_to_ids("<image_soft_token>") == rows
    assert not refusal(f"actor_rollout_ref.model.path={tmp_path / 'text'}")
    assert (words_of(again), words_of(again, [str(tmp_path / "text")])) == (rows + 1, rows)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_attention_heads": None}, ["num_attention_heads"]),
        ({"num_hidden_layers": -2}, ["num_hidden_layers", "-2"]),
        ({"num_key_value_heads": 0}, ["num_key_value_heads=0"]),
        ({"hidden_size": -8}, ["hidden_size=-8"]),
    ],
)
def test_sizes_that_no_model_has(inputs, tmp_path, change, named):
    values = json.loads((inputs / "model" / "config.json").read_text()) | change
    values = {name: value for name, value in values.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match=naming(str(tmp_path), *named)):
        load_model_config(tmp_path)
    read_model_facts(str(tmp_path))  # the check of the configuration is not stopped by it


@pytest.mark.parametrize("content", ['{"eos_token_id": [1,', "[1]", "[" * 3000 + "]" * 3000])
@pytest.mark.parametrize("file", ["generation_config.json", "tokenizer_config.json"])
def test_a_file_of_settings_that_is_damaged(inputs, refusal, tmp_path, file, content):
    """Without the first one transformers would load the model, which then stops at other tokens."""
    shutil.copytree(inputs / "model", tmp_path / "model")
    (tmp_path / "model" / file).write_text(content)
    said = refusal(f"actor_rollout_ref.model.path={tmp_path / 'model'}")
    what = "no tokenizer can be loaded from" if file.startswith("tokenizer") else f"{file} cannot be read"
    assert mentions(said, "ModelError", what, str(tmp_path / "model"))


@pytest.mark.parametrize(
    ("config", "generation", "override", "expected"),
    [
        ({"text_config": {"eos_token_id": [5, 6]}}, None, {}, [1, 5, 6]),  # as families with pictures have it
        ({"eos_token_id": 5}, None, {"eos_token_id": [6, 7]}, [1, 6, 7]),
        ({"eos_token_id": 5}, {"eos_token_id": 6}, {"eos_token_id": 7}, [1, 6]),
        (None, None, {}, [1]),
    ],
)
def test_the_end_tokens_of_a_model_that_is_not_loaded(tmp_path, config, generation, override, expected):
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    model = SimpleNamespace(path=str(tmp_path), override_config=override)
    assert end_ids(model, SimpleNamespace(eos_token_id=1), None) == expected


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_end_tokens_in_a_damaged_file(tmp_path, file):
    """An error of strop's: a run with an environment reports it with those of the other checks."""
    (tmp_path / file).write_text('{"eos_token_id": [1,')
    model = SimpleNamespace(path=str(tmp_path), override_config={})
    with pytest.raises(ModelError, match=naming(tmp_path, "generation", "cannot be read")):
        end_ids(model, SimpleNamespace(eos_token_id=1), None)
