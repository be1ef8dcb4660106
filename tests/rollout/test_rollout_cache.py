"""Packed linear layers against the layers themselves, and models whose cache cannot be used."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from strop.errors import ModelError
from strop.rollout.base import SamplingParams
from strop.rollout.hf.engine import HFRollout
from strop.rollout.hf.kv_cache import DecodeCache, keys_and_values
from strop.rollout.hf.packed_linear import layers_of_one_input, packed_linears

from messages import naming
from tiny_lms import prompts_of, tiny_lm


def test_a_model_that_fills_fewer_caches_than_it_has_layers_is_refused():
    filled = DynamicCache()
    filled.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), layer_idx=0)
    assert len(keys_and_values(filled, 1)) == 1
    with pytest.raises(ModelError, match=naming("1 of 2")):
        keys_and_values(filled, 2)


def test_a_mask_of_any_window_begins_where_the_kernels_of_a_gpu_can_read_it():
    prompt_mask = torch.tensor([[False, True, True, True, True], [True] * 5])
    like = [(torch.zeros(2, 1, 5, 8), torch.zeros(2, 1, 5, 8))] * 2
    cache = DecodeCache(like, [None, 4], prompt_mask=prompt_mask, limit=16, dtype=torch.bfloat16)
    for length in range(6, 17):
        masks = cache.next_column(None)
        whole, recent = masks["full_attention"], masks["sliding_attention"]
        assert (whole.shape[3], recent.shape[3]) == (length, 4)
        assert torch.equal(recent, whole[..., -4:])
        assert whole.data_ptr() % 16 == recent.data_ptr() % 16 == 0


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_packed_layers_compute_what_the_layers_compute(dtype, rows):
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(512, 384), nn.Linear(384, 512, bias=False), nn.Linear(16, 16)])
    inputs = [torch.randn(rows, 1, layer.in_features) for layer in layers]
    before = [layer.forward for layer in layers]

    def outputs() -> list[torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is not None):
            return [layer(x) for layer, x in zip(layers, inputs, strict=True)]

    with torch.no_grad():
        expected = outputs()
        with packed_linears(layers, dtype):
            assert ["forward" in vars(layer) for layer in layers] == [True, True, False]
            found = outputs()
            assert [x.dtype for x in found] == [x.dtype for x in expected]
    assert [layer.forward for layer in layers] == before
    for mine, theirs in zip(found, expected, strict=True):
        tolerance = 1e-5 if dtype is None else 2e-2
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)


def test_layers_that_always_get_one_input_are_found():
    model = tiny_lm()
    with layers_of_one_input(model) as groups, torch.no_grad():
        model(torch.tensor([[3, 4, 5]]))
        model(torch.tensor([[6, 7]]))
    names = {id(module): name.rpartition(".")[2] for name, module in model.named_modules()}
    expected = [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]] * model.config.num_hidden_layers
    assert [[names[id(layer)] for layer in group] for group in groups] == expected


def test_layers_whose_input_is_sometimes_another_or_overwritten_are_in_no_group():
    a, b, c = (nn.Linear(4, 4) for _ in range(3))
    with layers_of_one_input(nn.ModuleList([a, b, c])) as groups, torch.no_grad():
        x = torch.randn(2, 4)
        a(x), b(x)
        x.add_(1)
        c(x)
    assert groups == [[a, b]]
    with layers_of_one_input(nn.ModuleList([a, b, c])) as groups, torch.no_grad():
        a(x), b(x)
        a(x.clone()), b(x)
    assert groups == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_of_one_product_compute_what_the_layers_compute(dtype):
    torch.manual_seed(0)
    layers = [nn.Linear(256, out, bias=out != 128) for out in (512, 128, 64)]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    with (
        torch.no_grad(),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16),
    ):
        x, y = torch.randn(5, 1, 256), torch.randn(3, 2, 256)
        # in another order, twice, of inputs that alternate
        asked = [(0, x), (2, x), (2, x), (1, y), (1, x), (0, y), (2, y)]
        expected = [layers[number](input) for number, input in asked]
        doubled = layers[1](2 * x)
        with packed_linears(nn.ModuleList(layers), dtype, [layers]):
            found = [layers[number](input) for number, input in asked]
            layers[0](x)
            x.mul_(2)
            found.append(layers[1](x))
    for mine, theirs in zip(found, [*expected, doubled], strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)


def test_layers_are_unpacked_again_after_an_error():
    layer = nn.Linear(512, 512)
    with (
        pytest.raises(RuntimeError, match="mat1"),
        packed_linears(nn.Sequential(layer, nn.Linear(9, 9)), None),
    ):
        nn.Linear(9, 9)(layer(torch.zeros(1, 512)))
    assert "forward" not in vars(layer)


def test_packing_during_generation_changes_no_token(monkeypatch):
    monkeypatch.setattr("strop.rollout.hf.packed_linear._SMALLEST", {torch.float32: 1})
    model = tiny_lm()
    prompts, params = prompts_of([3, 9, 5], n=4), SamplingParams(max_tokens=12, n=4)
    rollout = HFRollout(model, pad_token_id=0, eos_token_ids=[1])
    with torch.inference_mode():  # of a program's own loop; its tensors do not count what writes to them
        packed = rollout.generate(prompts, params).batch
    monkeypatch.setattr("strop.rollout.hf.engine._PACK_FROM", 99)
    plain = rollout.generate(prompts, params).batch
    assert torch.equal(packed["responses"], plain["responses"])
    torch.testing.assert_close(packed["rollout_log_probs"], plain["rollout_log_probs"], atol=1e-5, rtol=1e-5)
