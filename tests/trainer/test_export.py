from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from saving_groups import STATE
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    MixtralConfig,
)

from strop.checkpoint.export import export
from strop.checkpoint.folder import require_own_files, source_in
from strop.checkpoint.hub import Publication, upload
from strop.checkpoint.store import Checkpoints
from strop.cli.main import main
from strop.engines.base import OptimizerSettings
from strop.engines.torch.engine import TorchEngine
from strop.errors import CheckpointError
from strop.models.loader import load_causal_lm, load_tokenizer
from strop.models.policy import PolicyModel
from strop.models.scorer import ValueModel
from strop.trainer.build import warn_of_generation_config

import tiny_model
from builders import write_prompts
from messages import mentions, naming

BF16 = torch.bfloat16
SETTINGS = OptimizerSettings(betas=(0.9, 0.999), weight_decay=0.0, eps=1e-8, grad_clip=1.0)


class EngineGroup:
    """A real engine behind the calls that a worker group has."""

    def __init__(self, engine: TorchEngine, tokenizer) -> None:
        self.engine, self.tokenizer = engine, tokenizer

    def save_checkpoint(self, folder: Path, background: bool = False) -> None:
        self.engine.save(folder, background=background)
        self.engine.export(folder / "huggingface", self.tokenizer, weights=not background)

    def save_is_done(self) -> bool:
        return self.engine.save_is_done()

    def finish_save(self) -> None:
        self.engine.finish_save()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of each kind, and the models as they were then; training went on before it was written."""
    folder = tmp_path_factory.mktemp("run")
    tokenizer = tiny_model.build_tokenizer()
    model = tiny_model.build_model(tokenizer, hidden=32)
    model.save_pretrained(folder / "base")
    critic = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=1)
    then = {"actor": copy.deepcopy(model.state_dict()), "critic": copy.deepcopy(critic.state_dict())}
    groups = {
        name: EngineGroup(TorchEngine(module, device=torch.device("cpu"), optimizer=SETTINGS), tokenizer)
        for name, module in (("actor", PolicyModel(model)), ("critic", ValueModel(critic)))
    }
    Checkpoints(folder).save(1, groups, STATE)
    with Checkpoints(folder, background=True) as checkpoints:
        checkpoints.save(2, groups, STATE)
        with torch.no_grad():
            for parameter in [*model.parameters(), *critic.parameters()]:
                parameter.add_(1.0)
    return folder, then


def assert_equal(found, expected, dtype=torch.float32) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, expected[name].to(dtype)), name


@pytest.mark.parametrize("step", [1, 2])
def test_a_checkpoint_of_either_kind_is_a_model_that_transformers_loads(saved, tmp_path, step):
    folder, then = saved
    checkpoint = folder / f"global_step_{step}"
    assert (checkpoint / "actor" / "huggingface" / "model.safetensors").exists() == (step == 1)
    actor = export(checkpoint, tmp_path / "actor")
    with pytest.raises(CheckpointError, match="exists"):
        export(checkpoint, actor)
    assert_equal(AutoModelForCausalLM.from_pretrained(actor, dtype="auto").state_dict(), then["actor"])
    assert (
        AutoTokenizer.from_pretrained(actor)("1+2").input_ids == tiny_model.build_tokenizer()("1+2").input_ids
    )
    critic = export(checkpoint, tmp_path / "critic", role="critic")
    loaded = AutoModelForSequenceClassification.from_pretrained(critic, dtype="auto")
    assert_equal(loaded.state_dict(), then["critic"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["actor", "critic"]


@pytest.mark.parametrize("kind", ["adapter_config.json", "config.json"])
@pytest.mark.parametrize("link", ["notes.txt", "below/notes.txt", "below"])
def test_a_link_out_of_a_model_is_neither_copied_nor_uploaded(tmp_path, capsys, kind, link):
    model, secret = tmp_path / "model", tmp_path / "secret" / "key.txt"
    for folder in (model / "below", secret.parent):
        folder.mkdir(parents=True)
    secret.write_text("Swordfish")
    (model / kind).write_text(json.dumps({"base_model_name_or_path": "a/b"}))
    (model / "adapter_model.safetensors").write_bytes(b"")
    if link == "below":
        (model / link).rmdir()
    (model / link).symlink_to(secret.parent if link == "below" else secret)
    for options in ([], ["--merge"]):
        assert main(["export", str(model), *options, "--out", str(tmp_path / "out")]) == 2
        assert mentions(capsys.readouterr().err, str(model / link), str(secret.parent))
    with pytest.raises(CheckpointError, match=naming(str(model / link))):
        upload(model, Publication("ada/first", "main"), run_folder=None, step=None)
    assert not (tmp_path / "out").exists()


def test_links_inside_of_a_model_and_of_the_hubs_cache_are_files(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "0f").write_text("{}")
    model = tmp_path / "snapshots" / ("0" * 40)
    model.mkdir(parents=True)
    (model / "config.json").symlink_to("../../blobs/0f")
    (model / "same.json").symlink_to("config.json")
    require_own_files(model)


@pytest.mark.parametrize("base", ["memory://models/base", "zip://::file:///tmp/x.zip"])
def test_the_base_of_an_adapter_is_no_url(tmp_path, capsys, monkeypatch, base):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # the cache of downloads
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    assert main(["export", str(adapter), "--merge", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert mentions(said, "base_model_name_or_path", base, "local folder", "hub")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "home").exists()


@pytest.fixture
def source(tmp_path):
    """A folder of an older transformers: bfloat16, with dropout, a template and no pad token."""
    folder = tmp_path / "source"
    tokenizer = tiny_model.build_tokenizer()
    tiny_model.build_model(tokenizer, hidden=32).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    added = ("dtype", "is_local", "local_files_only", "pad_token", "padding_side")
    for name, changes in {
        "config.json": {
            "torch_dtype": "bfloat16",
            "attention_dropout": 0.1,
            "transformers_version": "4.44.0",
        },
        "tokenizer_config.json": {"chat_template": tokenizer.chat_template},
        "generation_config.json": {"temperature": 0.7, "do_sample": True},
    }.items():
        values = json.loads((folder / name).read_text())
        values = {key: value for key, value in values.items() if key not in added} | changes
        (folder / name).write_text(json.dumps(values))
    (folder / "chat_template.jinja").unlink()
    return folder


GREEDY_WITH_TEMPERATURE = {"do_sample": False, "temperature": 0.7}
"""What transformers reads, and refuses to save."""


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_a_generation_configuration_that_is_not_valid_is_told_and_saved_as_it_is(
    source, tmp_path, caplog, file
):
    (source / "generation_config.json").write_text("{}")
    if file == "config.json":  # where older models have it
        (source / "generation_config.json").unlink()
    values = json.loads((source / file).read_text()) | GREEDY_WITH_TEMPERATURE
    (source / file).write_text(json.dumps(values))
    warn_of_generation_config("actor_rollout_ref.model", SimpleNamespace(path=str(source)), None)
    assert mentions(caplog.text, f"actor_rollout_ref.model.path={source}", "temperature", "do_sample")
    engine, tokenizer = load_engine(source)
    engine.export(tmp_path / "out", tokenizer)
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written["temperature"] == 0.7
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_a_valid_generation_configuration_is_not_told(source, caplog):
    warn_of_generation_config("actor_rollout_ref.model", SimpleNamespace(path=str(source)), None)
    assert caplog.text == ""


def load_engine(folder: Path, **options) -> tuple[TorchEngine, Any]:
    model = load_causal_lm(folder, **options)
    model.register_buffer("places", torch.arange(3))
    module = PolicyModel(model)
    return TorchEngine(module, device=torch.device("cpu"), optimizer=SETTINGS), load_tokenizer(folder)


def test_an_export_has_the_values_of_its_source(source, tmp_path):
    engine, tokenizer = load_engine(source)
    engine.export(tmp_path / "out", tokenizer)
    before, after = (folder_content(folder) for folder in (source, tmp_path / "out"))
    assert after.keys() == before.keys()
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        assert json.loads(after[name]) == json.loads(before[name])
    assert after["tokenizer.json"] == before["tokenizer.json"]
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.pop("places").dtype == torch.int64
    assert_equal(found, load_file(source / "model.safetensors"), BF16)
    # what is set on purpose counts; float32 where it is asked for
    engine, tokenizer = load_engine(source, override_config={"max_position_embeddings": 99})
    engine.export(tmp_path / "other", tokenizer, dtype=torch.float32)
    config = json.loads((tmp_path / "other/config.json").read_text())
    expected = json.loads(before["config.json"]) | {"max_position_embeddings": 99, "torch_dtype": "float32"}
    assert config == expected
    dtypes = {w.dtype for w in load_file(tmp_path / "other/model.safetensors").values()}
    assert dtypes == {torch.float32, torch.int64}


@pytest.mark.parametrize("rope", ["rope_parameters", "rope_scaling"])
def test_an_overridden_rope_is_that_of_the_export(source, tmp_path, rope):
    """transformers takes the older names first, which the source's file has."""
    values = json.loads((source / "config.json").read_text())
    before = values.pop("rope_parameters")
    values |= {"rope_theta": before["rope_theta"], "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    (source / "config.json").write_text(json.dumps(values))
    same, tokenizer = load_engine(source)
    same.export(tmp_path / "same", tokenizer)
    assert json.loads((tmp_path / "same/config.json").read_text()) == values
    yarn = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}
    engine, tokenizer = load_engine(source, override_config={rope: yarn})
    engine.export(tmp_path / "out", tokenizer)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.rope_parameters
    assert {name: found[name] for name in yarn} == yarn


def test_weights_are_readable_as_other_new_files_are(source, tmp_path):
    engine, tokenizer = load_engine(source)
    for mask in (0o022, 0o007):
        before = os.umask(mask)
        try:
            engine.export(tmp_path / f"out{mask}", tokenizer)
            out = export(tmp_path / f"out{mask}", tmp_path / f"half{mask}", dtype="bfloat16")
        finally:
            os.umask(before)
        for folder in (tmp_path / f"out{mask}", out):
            modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
            assert modes["model.safetensors"] == modes["config.json"] == 0o666 & ~mask


def folder_content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_exports_the_dtype_of_its_source_and_keeps_its_float32(source, tmp_path, background):
    engine, tokenizer = load_engine(source)
    balance = torch.tensor([0.1])  # as DeepSeek-V3's correction of its router, which stays in float32
    engine.module.hugging_face_model.register_buffer("balance", balance)
    with torch.no_grad():
        for weight in engine.module.parameters():
            weight.add_(1e-4)  # lost in bfloat16
    with Checkpoints(tmp_path / "run", background=background) as checkpoints:
        checkpoints.save(1, {"actor": EngineGroup(engine, tokenizer)}, STATE)
    weights = {
        dtype: load_file(
            export(tmp_path / "run/global_step_1", tmp_path / str(dtype), dtype=dtype) / "model.safetensors"
        )
        for dtype in (None, "float32")
    }
    trained = dict(engine.named_weights())
    assert [found.pop("places").dtype for found in weights.values()] == [torch.int64, torch.int64]
    assert [found.pop("balance") for found in weights.values()] == [balance, balance]
    assert_equal(weights["float32"], trained)
    assert_equal(weights[None], trained, BF16)
    config = json.loads((tmp_path / "None" / "config.json").read_text())
    assert (config["torch_dtype"], config["attention_dropout"], "dtype" in config) == ("bfloat16", 0.1, False)


def test_shards_become_the_tensors_of_a_familys_checkpoints(tmp_path):
    """transformers fuses the experts of Mixtral when it loads them; vLLM reads those of published files."""
    tokenizer = tiny_model.build_tokenizer()
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = AutoModelForCausalLM.from_config(MixtralConfig(vocab_size=len(tokenizer), **shape, **experts))
    model.save_pretrained(tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    module = PolicyModel(load_causal_lm(tmp_path / "source"))
    engine = TorchEngine(module, device=torch.device("cpu"), optimizer=SETTINGS)
    with Checkpoints(tmp_path / "run", background=True) as checkpoints:
        checkpoints.save(1, {"actor": EngineGroup(engine, load_tokenizer(tmp_path / "source"))}, STATE)
    out = export(tmp_path / "run/global_step_1", tmp_path / "out")
    assert_equal(load_file(out / "model.safetensors"), load_file(tmp_path / "source/model.safetensors"))


def test_a_folder_without_a_dtype_has_that_of_its_weights(source, tmp_path):
    config = json.loads((source / "config.json").read_text())
    del config["torch_dtype"]
    (source / "config.json").write_text(json.dumps(config))
    # which transformers does not read, and repositories of Mistral have
    save_file({"tok_embeddings.weight": torch.zeros(2)}, source / "consolidated.safetensors")
    engine, tokenizer = load_engine(source)
    engine.export(tmp_path / "out", tokenizer)
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.pop("places").dtype == torch.int64
    assert_equal(found, load_file(source / "model.safetensors"), BF16)


def test_there_is_nothing_to_merge_in_a_model(saved, tmp_path):
    with pytest.raises(CheckpointError, match="no LoRA adapter"):
        export(saved[0] / "global_step_1", tmp_path / "out", merge=True)


@pytest.mark.parametrize(("step", "dtype"), [(1, torch.bfloat16), (2, torch.bfloat16), (2, torch.float32)])
def test_the_command_converts_weights(saved, tmp_path, capsys, step, dtype):
    folder, then = saved
    options = ["--out", str(tmp_path / "out"), "--dtype", str(dtype).removeprefix("torch.")]
    assert main(["export", str(folder / f"global_step_{step}"), *options]) == 0, capsys.readouterr().err
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.config.dtype == dtype
    assert_equal(loaded.state_dict(), then["actor"], dtype)


def test_the_folder_of_a_model_is_converted(saved, tmp_path):
    folder, then = saved
    model = export(folder / "global_step_1", tmp_path / "run" / "final_model")
    out = export(model, tmp_path / "out", dtype="bfloat16")
    assert_equal(
        AutoModelForCausalLM.from_pretrained(out, dtype="auto").state_dict(), then["actor"], torch.bfloat16
    )
    assert {path.name for path in out.iterdir()} == {path.name for path in model.iterdir()}


def test_of_a_run_folder_the_newest_model_is_taken_or_the_chosen_one(saved, tmp_path, capsys):
    run, _ = saved
    assert source_in(run) == source_in(run, step=2) == run / "global_step_2"
    assert source_in(run, step=1) == source_in(run / "global_step_1") == run / "global_step_1"
    assert main(["export", str(run), "--out", str(tmp_path / "model")]) == 0
    assert (tmp_path / "model" / "model.safetensors").is_file()
    capsys.readouterr()
    for given, *expected in (
        (run, "--step=3", "no checkpoint of iteration 3", "1, 2"),
        (run, "--best", "that was validated", "1, 2"),
        (tmp_path / "model", "--best", "name a run folder"),
    ):
        assert main(["export", str(given), expected.pop(0), "--out", str(tmp_path / "no")]) == 2
        assert mentions(capsys.readouterr().err, *expected)


def test_of_a_run_the_model_that_it_publishes_is_exported(saved, tmp_path, capsys):
    """``final_model`` is whole with ``lora_merge``; checkpoints hold adapters, and weights in float32."""
    run = tmp_path / "run"
    shutil.copytree(saved[0] / "global_step_1", run / "global_step_1")
    (run / "final_model").mkdir()
    (run / "final_model" / "config.json").write_text("{}")
    (run / "final_model" / "trainer_state.json").write_text('{"global_step": 1}')

    def exported(name, *options):
        assert main(["export", str(run), *options, "--out", str(tmp_path / name)]) == 0
        return {path.name for path in (tmp_path / name).iterdir()}

    final = {"config.json", "trainer_state.json", "manifest.json"}
    assert exported("newest") == exported("chosen", "--step=1") == final
    assert {path.name for path in export(run, tmp_path / "in Python").iterdir()} == final
    assert "model.safetensors" in exported("float32", "--dtype=float32")
    assert "model.safetensors" in exported("critic", "--role=critic")
    adapter = run / "global_step_1" / "actor" / "huggingface" / "adapter_config.json"
    whole, hidden = adapter.with_name("model.safetensors"), run / "model.safetensors"
    adapter.write_text("{}")
    whole.rename(hidden)
    assert exported("merged", "--dtype=float32") == final  # the checkpoint has no whole weights to convert
    hidden.rename(whole)
    adapter.unlink()
    capsys.readouterr()
    for options, said in (
        (["--merge"], ["global_step_1", "nothing to merge"]),
        (["--role=reward_model"], ["holds no reward_model"]),
    ):
        assert main(["export", str(run), *options, "--out", str(tmp_path / "none")]) == 2
        assert mentions(capsys.readouterr().err, *said)


def test_an_exported_adapter_is_said_to_be_one(tmp_path, capsys):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert main(["export", str(tmp_path / "adapter"), "--out", str(tmp_path / "out")]) == 0
    assert mentions(capsys.readouterr().out, "LoRA adapter", "--merge", tmp_path / "out")


@pytest.mark.parametrize("step", [1, 2])
def test_a_remote_checkpoint_is_exported_and_only_what_is_needed_is_fetched(
    saved, tmp_path, monkeypatch, step
):
    folder, then = saved
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.put(str(folder / f"global_step_{step}"), f"/bucket/global_step_{step}", recursive=True)
    fetched = []
    original = type(fs).get_file

    def noting(self, rpath, lpath, **kwargs):
        fetched.append(rpath.removeprefix(f"/bucket/global_step_{step}/"))
        return original(self, rpath, lpath, **kwargs)

    monkeypatch.setattr(type(fs), "get_file", noting)
    out = export(f"memory://bucket/global_step_{step}", tmp_path / "out")
    assert_equal(AutoModelForCausalLM.from_pretrained(out, dtype="auto").state_dict(), then["actor"])
    prefix = "actor/huggingface/" if step == 1 else "actor/"
    assert fetched
    assert all(name.startswith(prefix) for name in fetched)
    with pytest.raises(CheckpointError, match=naming("reward", "actor", "critic")):
        export(f"memory://bucket/global_step_{step}", tmp_path / "none", role="reward")


@pytest.mark.parametrize(("step", "suffix"), [(1, ".safetensors"), (2, ".distcp"), (2, ".json")])
@pytest.mark.parametrize("remote", [False, True])
def test_a_flipped_bit_is_not_exported(saved, tmp_path, step, suffix, remote):
    checkpoint = tmp_path / f"global_step_{step}"
    shutil.copytree(saved[0] / checkpoint.name, checkpoint)
    flip(next(path for path in (checkpoint / "actor").rglob(f"*{suffix}")))
    with pytest.raises(CheckpointError, match=suffix):
        export(f"file://{checkpoint}" if remote else checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_that_was_added_is_not_exported(saved, tmp_path):
    shutil.copytree(
        saved[0] / "global_step_2", tmp_path / "global_step_2"
    )  # of a background save: no weights
    weights = "actor/huggingface/model.safetensors"
    shutil.copy(saved[0] / "global_step_1" / weights, tmp_path / "global_step_2" / weights)
    with pytest.raises(CheckpointError, match=naming(weights)):
        export(tmp_path / "global_step_2", tmp_path / "out")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_an_exported_model_that_changed_is_not_evaluated(saved, tmp_path, capsys):
    model = export(saved[0] / "global_step_1", tmp_path / "model")
    write_prompts(tmp_path / "val.parquet", 4)
    lengths = ["--max-prompt-length", "8", "--max-response-length", "2", "trainer.device=cpu"]
    command = ["eval", str(model), "--data", str(tmp_path / "val.parquet"), *lengths]
    assert main([*command, "--out", str(tmp_path / "whole")]) == 0
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(model, tokenizer)
    vocabulary = (tokenizer / "tokenizer.json").read_text()
    (tokenizer / "tokenizer.json").write_text(vocabulary.replace('"7"', '"x"'))  # loads, with another token
    flip(model / "model.safetensors")
    for changed, file in (
        ([f"data.tokenizer={tokenizer}"], "tokenizer.json"),
        ([], "model.safetensors"),
    ):
        capsys.readouterr()
        assert main([*command, "--out", str(tmp_path / "changed"), *changed]) == 2
        assert mentions(capsys.readouterr().err, "CheckpointError", file, "manifest.json")


def test_an_export_that_fails_leaves_nothing(saved, tmp_path):
    folder, _ = saved
    broken = tmp_path / "global_step_2"
    shutil.copytree(folder / "global_step_2", broken)
    shard = next((broken / "actor").glob("*.distcp"))
    shard.write_bytes(bytes(shard.stat().st_size))  # the size is right, the content is not
    with pytest.raises(CheckpointError):
        export(broken, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_2"]
