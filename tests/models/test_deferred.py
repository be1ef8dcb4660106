"""Models built without memory, whose weights and saved buffers are read later."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import families
import pytest
import torch
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


def test_buffers_beside_converted_weights_are_an_error(tmp_path):
    """DeepSeek-V3's routing bias is such a buffer."""
    model = families.model("DeepseekV3", **DEEPSEEK)
    for name, buffer in model.named_buffers():
        if BIAS in name:
            buffer.normal_()
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=naming(BIAS)):
        defer_causal_lm(tmp_path)
    biases = [buffer for name, buffer in load_causal_lm(tmp_path).named_buffers() if BIAS in name]
    assert biases
    assert all(bias.abs().sum() > 0 for bias in biases)  # one process reads them


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
            assert built.wait(10)
            return nn.Linear(2, 2).weight.is_meta

    with ThreadPoolExecutor(1) as pool:
        deferred = pool.submit(on_meta)
        assert inside.wait(10)
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
