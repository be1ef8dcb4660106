from __future__ import annotations

from copy import deepcopy

import families
import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from strop.models.passes.rms_norm import replace_rms_norms


def _norm(hidden: int, dtype: torch.dtype) -> Qwen2RMSNorm:
    norm = Qwen2RMSNorm(hidden, eps=1e-3).to(dtype)
    torch.nn.init.normal_(norm.weight, 1.0, 0.3)
    return norm


def _gradients(norm, states, upstream):
    leaf = states.clone().requires_grad_()
    norm.weight.grad = None
    out = norm(leaf)
    out.backward(upstream)
    return out.detach(), leaf.grad.double(), norm.weight.grad.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 3000, 16), (2, 5, 3, 8)])
def test_forward_is_that_of_transformers_and_gradients_are_those_of_float64(dtype, shape):
    torch.manual_seed(0)
    own = _norm(shape[-1], dtype)
    ours, exact = deepcopy(own), deepcopy(own).double()
    assert replace_rms_norms(ours) == 1
    states, upstream = (torch.randn(shape).to(dtype) for _ in range(2))
    states, upstream = states.transpose(0, 1), upstream.transpose(0, 1)  # not contiguous
    found, expected = _gradients(ours, states, upstream), _gradients(own, states, upstream)
    assert torch.equal(found[0], expected[0])
    with torch.no_grad():
        assert torch.equal(ours(states), expected[0])
    leaf = states.double().requires_grad_()
    scale = (leaf.square().mean(-1, keepdim=True) + 1e-3).rsqrt()
    (leaf * scale * exact.weight).backward(upstream.double())
    for gradient, reference in zip(found[1:], (leaf.grad, exact.weight.grad), strict=True):
        bound = 1e-6 if dtype == torch.float32 else 2**-9
        assert (gradient - reference).norm() <= bound * reference.norm()


def test_a_frozen_weight_gets_no_gradient():
    norm = _norm(8, torch.float32).requires_grad_(False)
    replace_rms_norms(norm)
    states = torch.randn(4, 8, requires_grad=True)
    norm(states).sum().backward()
    assert states.grad is not None
    assert norm.weight.grad is None


@pytest.mark.parametrize(
    ("family", "norms"), [("Qwen2", 5), ("Llama", 5), ("Qwen3", 9), ("Gemma2", 0), ("Olmo2", 0)]
)
def test_families_with_another_formula_are_left_alone(family, norms):
    assert replace_rms_norms(families.model(family)) == norms
