from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from strop.models import attention
from strop.models.passes import short_attention
from strop.models.passes.shared_prompts import runs_of

SEQUENCES, QUERIES, KEYS, WIDTH = 4, 20, 32, 16


def _states(length: int, heads: int) -> torch.Tensor:
    return torch.randn(SEQUENCES, length, heads, WIDTH).bfloat16().transpose(1, 2)


def _gradients(attend, tensors, upstream):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    output = attend(*leaves)
    output.backward(upstream)
    return [output.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("firsts", [[0], [12], [12, 5, 0, 11]])
@pytest.mark.parametrize("window", [None, 7])
def test_results_and_gradients_are_those_of_float64_but_for_roundings(monkeypatch, groups, firsts, window):
    torch.manual_seed(0)
    if window is None:  # three sequences at once
        monkeypatch.setattr(short_attention, "_MOST", 3 * 6 * KEYS * (KEYS if firsts == [0] else QUERIES))
    queries = KEYS if firsts == [0] else QUERIES
    query, key, value = _states(queries, 6), _states(KEYS, groups), _states(KEYS, groups)
    upstream = torch.randn(SEQUENCES, queries, 6, WIDTH).bfloat16()
    mask = attention._mask(firsts, queries, KEYS, window, query.device)
    places = torch.tensor(firsts)[:, None] + torch.arange(queries)
    distance = places.clamp(max=KEYS - 1)[..., None] - torch.arange(KEYS)
    seen = (distance >= 0) & (distance < (window or KEYS))

    def exactly(query, key, value):
        found = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen[:, None], scale=0.3, enable_gqa=True
        )
        return found.transpose(1, 2)

    found = _gradients(
        lambda *heads: short_attention.attention_by_products(*heads, mask, 0.3), (query, key, value), upstream
    )
    doubles = [states.double() for states in (query, key, value)]
    expected = _gradients(exactly, doubles, upstream.double())
    for ours, exact in zip(found, expected, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours - exact).norm() < 5e-3 * exact.norm()


def test_pieces_share_a_call_only_where_padding_costs_less_than_a_call():
    short = runs_of([[0, 30]] * 4 + [[0, 40]] * 4, [60, 50, 45, 40, 80, 70, 60, 45])
    assert len(short) < 8
    assert sorted(length for run in short for length in run.lengths) == sorted(
        [30, 20, 15, 10, 40, 30, 20, 5] + 4 * [30] + 4 * [40]
    )
    long = runs_of([[0], [0], [0], [0, 900]], [2000, 1500, 1450, 1000])
    assert [run.rows for run in long] == [[0], [1, 2], [3], [3]]
