"""Models built without memory, whose weights and saved buffers are read later."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import families
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Qwen2Model

from strop.errors import ModelError
from strop.models.deferred import _parameters_on_meta, defer_causal_lm
from strop.models.loader import load_causal_lm

import tiny_model
from messages import naming

BIAS = "e_score_correction_bias"
DEEPSEEK = {
    "intermediate_size": 16, "moe_intermediate_size": 8, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8,
    "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip


def test_experts_are_fused_from_single_tensors_and_buffers_beside_them_are_read(tmp_path):
    """DeepSeek-V3's routing bias is such a buffer."""
    model = families.model("DeepseekV3", **DEEPSEEK)
    for name, buffer in model.named_buffers():
        if BIAS in name:
            buffer.normal_()
    model.save_pretrained(tmp_path)
    deferred, source = defer_causal_lm(tmp_path)
    assert source.readable
    own = dict(model.named_parameters())
    read = dict(source.stream())
    assert read.keys() == own.keys()
    assert all(torch.equal(read[name], weight) for name, weight in own.items())
    buffers = dict(deferred.named_buffers())
    assert all(torch.equal(buffers[name], each) for name, each in model.named_buffers() if BIAS in name)

    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=naming(BIAS)):
        defer_causal_lm(tmp_path)


def test_a_buffer_whose_name_in_files_is_another_one_is_read(tmp_path):
    """Published files of MiniMax-M2 have the routing bias beside the router, transformers within it."""
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 4}
    model = families.model("MiniMaxM2", **sizes)
    for name, buffer in model.named_buffers():
        if BIAS in name:
            buffer.normal_()
    model.save_pretrained(tmp_path)
    stored = {name for name in load_file(tmp_path / "model.safetensors") if BIAS in name}
    deferred, source = defer_causal_lm(tmp_path)
    assert source.readable
    own = {name: buffer for name, buffer in model.named_buffers() if BIAS in name}
    assert own
    assert not stored & own.keys()
    buffers = dict(deferred.named_buffers())
    assert all(torch.equal(buffers[name], buffer) for name, buffer in own.items())


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("Mixtral", {"num_local_experts": 3}),
        ("Qwen2Moe", {"num_experts": 3, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}),
    ],
)
def test_weights_that_transformers_renames_or_fuses_are_read_singly(tmp_path, family, sizes):
    model = families.model(family, **sizes)
    model.save_pretrained(tmp_path)
    _, source = defer_causal_lm(tmp_path)
    assert source.readable
    assert all(torch.equal(source.read(name), weight) for name, weight in model.named_parameters())


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
@pytest.mark.parametrize("load", [defer_causal_lm, load_causal_lm])
def test_an_index_names_no_file_outside_its_folder(tmp_path, index, load):
    folder = tiny_model.save(tmp_path / "model", hidden=32)
    weights = load_file(folder / "model.safetensors")
    if "safetensors" in index:
        (folder / "model.safetensors").rename(tmp_path / "outside")
    else:
        torch.save(weights, tmp_path / "outside")
        (folder / "model.safetensors").unlink()
    content = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(weights, "../outside")}
    (folder / index).write_text(json.dumps(content))
    with pytest.raises(ModelError, match=naming(index, "'../outside'")):
        load(folder)


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"weight_map": null}', '{"weight_map": [1]}', "[" * 3000 + "]" * 3000]
)
def test_an_index_that_is_damaged_is_an_error_where_the_weights_are_read(tmp_path, content):
    folder = tiny_model.save(tmp_path, hidden=32)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(content)
    _, source = defer_causal_lm(folder)  # the index is not needed to build the model
    assert not source.readable
    with pytest.raises(ModelError, match=naming(folder)):
        next(source.stream())


def test_a_deferred_model_has_the_buffers_of_the_file(tmp_path, monkeypatch):
    build = Qwen2Model.__init__

    def with_buffer(self, config):
        build(self, config)
        self.register_buffer("calibration", torch.zeros(3))

    monkeypatch.setattr(Qwen2Model, "__init__", with_buffer)
    model = families.model("Qwen2")
    model.model.calibration.copy_(torch.tensor([1.0, 2.0, 3.0]))
    model.save_pretrained(tmp_path)
    deferred, source = defer_causal_lm(tmp_path)
    assert source.readable
    assert deferred.model.calibration.tolist() == [1.0, 2.0, 3.0]
    assert next(deferred.parameters()).is_meta


def test_a_thread_that_builds_on_meta_leaves_another_thread_alone():
    inside, built = threading.Event(), threading.Event()

    def on_meta() -> bool:
        with _parameters_on_meta():
            inside.set()
            assert built.wait(300)
            return nn.Linear(2, 2).weight.is_meta

    with ThreadPoolExecutor(1) as pool:
        deferred = pool.submit(on_meta)
        assert inside.wait(300)
        here = nn.Linear(2, 2).weight.is_meta
        built.set()
        assert deferred.result()
        assert not here
    assert not nn.Linear(2, 2).weight.is_meta


def test_models_are_built_by_two_threads_at_once(tmp_path):
    """Pools of an asynchronous local run do the same."""
    folder = tiny_model.save(tmp_path, hidden=16)
    expected = dict(load_causal_lm(folder).named_parameters())
    barrier = threading.Barrier(2)

    def build(deferred: bool) -> list:
        barrier.wait()
        return [defer_causal_lm(folder) if deferred else load_causal_lm(folder) for _ in range(10)]

    with ThreadPoolExecutor(2) as pool:
        models, loaded = pool.map(build, (True, False))
    assert all(parameter.is_meta for model, _ in models for parameter in model.parameters())
    streamed = [dict(source.stream()) for _, source in models]
    for weights in (*streamed, *(dict(model.named_parameters()) for model in loaded)):
        assert weights.keys() == expected.keys()
        assert all(weights[name].equal(expected[name]) for name in expected)
