"""Buffers that belong to a saved model, such as DeepSeek-V3's routing bias, are read with its weights."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen2Model

from strop.errors import ModelError
from strop.models.deferred import defer_causal_lm
from strop.models.loader import load_causal_lm

import tiny_model
from messages import naming

BIAS = "e_score_correction_bias"


@pytest.fixture
def folder(tmp_path):
    config = DeepseekV3Config(
        vocab_size=24, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, n_group=2, topk_group=1,
        num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=8,
        qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
    )  # fmt: skip
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(config)
    for name, buffer in model.named_buffers():
        if BIAS in name:
            buffer.normal_()
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_buffers_beside_converted_weights_are_an_error(folder):
    with pytest.raises(ModelError, match=naming(BIAS)):
        defer_causal_lm(folder)
    biases = [buffer for name, buffer in load_causal_lm(folder).named_buffers() if BIAS in name]
    assert all(bias.abs().sum() > 0 for bias in biases)  # one process reads them


def test_a_deferred_model_has_the_buffers_of_the_file(tmp_path, monkeypatch):
    build = Qwen2Model.__init__

    def with_buffer(self, config):
        build(self, config)
        self.register_buffer("calibration", torch.zeros(3))

    monkeypatch.setattr(Qwen2Model, "__init__", with_buffer)
    model = tiny_model.build_model(tiny_model.build_tokenizer(), hidden=16, seed=0)
    model.model.calibration.copy_(torch.tensor([1.0, 2.0, 3.0]))
    model.save_pretrained(tmp_path)
    deferred, source = defer_causal_lm(tmp_path)
    assert source.readable
    assert deferred.model.calibration.tolist() == [1.0, 2.0, 3.0]
    assert next(deferred.parameters()).is_meta
