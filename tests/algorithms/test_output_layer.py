"""Log-probs and entropies in blocks of the vocabulary, against logits that exist as a whole."""

from __future__ import annotations

import math
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from largest import Largest
from torch.nn import functional
from torch.testing import assert_close

from strop.algorithms import output_layer
from strop.algorithms.output_layer import OutputLayer, log_probs_and_entropy

FACTOR = st.floats(0.5, 2.0)


def whole(hidden, layer, ids, temperature):
    """The formula, with all logits."""
    logits = functional.linear(hidden, layer.weight_VH, layer.bias_V) * layer.scale
    if layer.soft_cap is not None:
        logits = layer.soft_cap * torch.tanh(logits / layer.soft_cap)
    log_p = torch.log_softmax(logits / temperature, -1)
    entropy = torch.special.entr(log_p.exp()).sum(-1)
    return log_p.gather(1, ids[:, None])[:, 0], entropy


def distance(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def small_blocks(patch, words, n_tokens, *, kept=0):
    """Blocks of ``words``; the float32 products of ``kept`` words are saved."""
    patch.setattr(output_layer, "_BLOCK_ON_CPU", words * n_tokens)
    patch.setattr(output_layer, "_STEP", 1)
    patch.setattr(output_layer, "_KEPT", 4 * n_tokens * kept)


def leaves(n_tokens, hidden, vocabulary, *, with_bias, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    tensors = [draw(n_tokens, hidden), draw(vocabulary, hidden) * 2 / hidden**0.5]
    if with_bias:
        tensors.append(draw(vocabulary))
    return [tensor.requires_grad_() for tensor in tensors], generator


def run(function, tensors, ids, upstream, *, dtype=torch.float32, scale=1.0, soft_cap=None, temperature=1.0):
    """Log-probs, entropies, and the gradients of a weighted sum of both."""
    inputs = [tensor.to(dtype) for tensor in tensors]
    layer = OutputLayer(inputs[1], inputs[2] if len(inputs) > 2 else None, scale, soft_cap)
    log_probs, entropy = function(inputs[0], layer, ids, temperature)
    total = (log_probs * upstream[0] + entropy * upstream[1]).sum()
    return [log_probs, entropy, *torch.autograd.grad(total, tensors)]


def blockwise(hidden, layer, ids, temperature):
    return log_probs_and_entropy(hidden, layer, ids, temperature=temperature)


LAYERS = st.one_of(
    st.fixed_dictionaries({"temperature": FACTOR}),
    st.fixed_dictionaries({"temperature": FACTOR, "scale": FACTOR, "soft_cap": st.floats(2.0, 8.0)}),
)


@settings(max_examples=120)
@given(
    n_tokens=st.integers(8, 40),  # of one or two numbers, what is left may be what cancels out
    hidden=st.integers(8, 24),
    vocabulary=st.integers(8, 300),
    words=st.integers(1, 300),
    kept=st.integers(0, 300),
    with_bias=st.booleans(),
    seed=st.integers(0, 1000),
    layer=LAYERS,
)
def test_values_and_gradients_are_those_of_whole_logits(
    n_tokens, hidden, vocabulary, words, kept, with_bias, seed, layer
):
    """Scaled logits lose digits, and so do whole ones: their own error is the measure."""
    tensors, generator = leaves(n_tokens, hidden, vocabulary, with_bias=with_bias, seed=seed)
    ids = torch.randint(vocabulary, (n_tokens,), generator=generator)
    upstream = torch.randn(2, n_tokens, generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, words, n_tokens, kept=kept)
        found = run(blockwise, tensors, ids, upstream, **layer)
    exact = run(whole, tensors, ids, upstream, dtype=torch.float64, **layer)
    usual = run(whole, tensors, ids, upstream, **layer)
    for ours, truth, theirs in zip(found, exact, usual, strict=True):
        assert ours.dtype == torch.float32
        assert distance(ours, truth) < 1e-6 + 5 * distance(theirs, truth)


@pytest.mark.parametrize("kept", [0, 20, 50])
@pytest.mark.parametrize(("n_tokens", "hidden", "vocabulary"), [(1, 1, 1), (1, 1, 2), (1, 8, 3), (3, 1, 50)])
def test_the_smallest_shapes(monkeypatch, n_tokens, hidden, vocabulary, kept):
    small_blocks(monkeypatch, 2, n_tokens, kept=kept)
    tensors, _ = leaves(n_tokens, hidden, vocabulary, with_bias=True)
    ids = torch.arange(n_tokens) % vocabulary
    found = log_probs_and_entropy(tensors[0], OutputLayer(*tensors[1:]), ids, temperature=0.9)
    expected = whole(tensors[0], OutputLayer(*tensors[1:]), ids, 0.9)
    ours, theirs = (torch.autograd.grad(sum(figures).sum(), tensors) for figures in (found, expected))
    for mine, other in zip([*found, *ours], [*expected, *theirs], strict=True):
        assert_close(mine, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("used", [0, 1])
def test_either_output_alone_has_its_own_gradient(monkeypatch, used):
    small_blocks(monkeypatch, 30, 9)
    tensors, _ = leaves(9, 5, 100, with_bias=True)
    ids, layer = torch.arange(9) * 11, OutputLayer(tensors[1], tensors[2])
    found = log_probs_and_entropy(tensors[0], layer, ids, temperature=0.8)[used]
    expected = whole(tensors[0], layer, ids, 0.8)[used]
    for ours, theirs in zip(
        torch.autograd.grad(found.sum(), tensors), torch.autograd.grad(expected.sum(), tensors), strict=True
    ):
        assert distance(ours, theirs) < 1e-6


@pytest.mark.parametrize("trained", [(0,), (1,), (2,), (0, 2)])
def test_what_is_frozen_gets_no_gradient(trained):
    tensors, _ = leaves(6, 5, 50, with_bias=True)
    for number, tensor in enumerate(tensors):
        tensor.requires_grad_(number in trained)
    layer, ids = OutputLayer(tensors[1], tensors[2]), torch.arange(6)
    sum(log_probs_and_entropy(tensors[0], layer, ids, temperature=1.0)).sum().backward()
    found = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    sum(whole(tensors[0], layer, ids, 1.0)).sum().backward()
    for number, tensor in enumerate(tensors):
        assert (found[number] is None) == (number not in trained)
        if number in trained:
            assert distance(found[number], tensor.grad) < 1e-6


@pytest.mark.parametrize("kept", [0, 20, 50])
def test_forbidden_words_have_probability_0_and_break_nothing(monkeypatch, kept):
    small_blocks(monkeypatch, 10, 8, kept=kept)
    tensors, _ = leaves(8, 4, 40, with_bias=True)
    with torch.no_grad():
        tensors[2][:25] = -math.inf  # two blocks are forbidden as a whole, the first among them
    allowed = [tensors[0], tensors[1][25:], tensors[2][25:]]
    ids = torch.arange(8) + 26
    found = log_probs_and_entropy(tensors[0], OutputLayer(*tensors[1:]), ids, temperature=0.5)
    expected = whole(allowed[0], OutputLayer(*allowed[1:]), ids - 25, 0.5)
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    ours, theirs = (torch.autograd.grad(sum(figures).sum(), tensors) for figures in (found, expected))
    assert distance(ours[0], theirs[0]) < 1e-6
    assert distance(ours[1], theirs[1]) < 1e-6
    assert torch.equal(ours[1][:25], torch.zeros(25, 4))
    assert ours[2].isfinite().all()


@pytest.mark.parametrize("layer", [{}, {"temperature": 0.9}, {"scale": 1.1, "soft_cap": 5.0}])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_that_are_kept_change_no_bit(monkeypatch, dtype, with_bias, layer):
    n_tokens, vocabulary = 20, 200
    tensors, generator = leaves(n_tokens, 32, vocabulary, with_bias=with_bias)
    ids = torch.randint(vocabulary, (n_tokens,), generator=generator)
    upstream = torch.randn(2, n_tokens, generator=generator)
    runs, product = [], Mock(wraps=output_layer._product)
    monkeypatch.setattr(output_layer, "_product", product)
    for kept, products in ((0, 12), (100 * dtype.itemsize // 4, 11), (vocabulary, 8)):  # of 4 blocks
        small_blocks(monkeypatch, 64, n_tokens, kept=kept)
        monkeypatch.setattr(output_layer, "_CHUNK_ON_CPU", 0)
        product.reset_mock()
        runs.append(run(blockwise, tensors, ids, upstream, dtype=dtype, **layer))
        assert product.call_count == products
    for figures in runs[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(figures, runs[0], strict=True))


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_rounds_the_products_and_nothing_else(monkeypatch, autocast):
    small_blocks(monkeypatch, 64, 20)
    tensors, _ = leaves(20, 32, 200, with_bias=False)
    ids = torch.arange(20) * 7
    kind = torch.float32 if autocast else torch.bfloat16
    inputs = [tensor.detach().to(kind).requires_grad_() for tensor in tensors]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = log_probs_and_entropy(inputs[0], OutputLayer(inputs[1]), ids, temperature=0.9)
        logits = functional.linear(*inputs)
    assert logits.dtype == torch.bfloat16
    log_p = torch.log_softmax(logits.float() / 0.9, -1)
    expected = log_p.gather(1, ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    assert_close(found[0], expected[0], atol=1e-5, rtol=1e-5)
    assert_close(found[1], expected[1], atol=1e-5, rtol=1e-5)
    ours, theirs = (torch.autograd.grad(sum(figures).sum(), inputs) for figures in (found, expected))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == kind
        assert distance(mine, other) < 1e-2
    exact = whole(tensors[0].double(), OutputLayer(tensors[1].double()), ids, 0.9)
    for mine, truth in zip(ours, torch.autograd.grad(sum(exact).sum(), tensors), strict=True):
        assert distance(mine, truth) < 2e-2


def test_nothing_larger_than_a_block_or_the_gradients_is_made(monkeypatch):
    n_tokens, hidden, vocabulary = 256, 8, 40_000
    monkeypatch.setattr(output_layer, "_KEPT", 0)
    tensors, _ = leaves(n_tokens, hidden, vocabulary, with_bias=False)
    with Largest() as largest:
        found = log_probs_and_entropy(
            tensors[0], OutputLayer(tensors[1]), torch.arange(n_tokens), temperature=0.9
        )
        sum(found).sum().backward()
    assert (
        largest.elements <= max(output_layer._BLOCK_ON_CPU, vocabulary * hidden) < n_tokens * vocabulary / 8
    )


def test_the_layer_itself_gives_the_logits():
    hidden, weight, bias = torch.randn(2, 3, 4), torch.randn(7, 4), torch.randn(7)
    expected = 5 * torch.tanh(0.5 * (hidden @ weight.T + bias) / 5)
    assert_close(OutputLayer(weight, bias, 0.5, 5.0)(hidden), expected)
    assert torch.equal(OutputLayer(weight)(hidden), functional.linear(hidden, weight))


def _wide_mm(a, b, *, out_dtype):
    """torch.mm of a GPU: 16-bit operands, a float32 product."""
    assert a.dtype == b.dtype == torch.bfloat16
    assert out_dtype == torch.float32
    return a.float() @ b.float()


@pytest.mark.parametrize(("wide", "words"), [(False, 4000), (False, 500), (True, 0)])
def test_the_sum_over_blocks_is_as_near_as_the_product_of_a_linear_layer(monkeypatch, wide, words):
    """All 400 blocks contribute; 2.5e-3 is a rounding of the logits' gradients and one of the product."""
    n_tokens, hidden, vocabulary = 16, 32, 4000
    small_blocks(monkeypatch, 10, n_tokens)
    monkeypatch.setattr(output_layer, "_has_wide_products", lambda device: wide)
    monkeypatch.setattr(output_layer, "_CHUNK_ON_CPU", n_tokens * words)
    if wide:
        plain = torch.mm
        monkeypatch.setattr(
            torch, "mm", lambda a, b, **kw: _wide_mm(a, b, **kw) if "out_dtype" in kw else plain(a, b, **kw)
        )
    tensors, generator = leaves(n_tokens, hidden, vocabulary, with_bias=False)
    ids = torch.randint(vocabulary, (n_tokens,), generator=generator)
    upstream = torch.randn(2, n_tokens, generator=generator)
    with torch.autocast("cpu", torch.bfloat16):
        found = log_probs_and_entropy(tensors[0], OutputLayer(tensors[1]), ids, temperature=1.0)
        logits = functional.linear(*tensors)
    ours = torch.autograd.grad((found[0] * upstream[0] + found[1] * upstream[1]).sum(), tensors[0])[0]
    logits = logits.detach().double().requires_grad_()
    log_p = logits.log_softmax(-1)
    figures = log_p.gather(1, ids[:, None])[:, 0] * upstream[0] - (log_p.exp() * log_p).sum(-1) * upstream[1]
    (gradient,) = torch.autograd.grad(figures.sum(), logits)
    exact = gradient @ tensors[1].detach().bfloat16().double()
    assert distance(ours, exact) < 2.8e-3


def test_a_second_backward_pass_gives_the_same_gradients():
    tensors, generator = leaves(9, 8, 50, with_bias=True)
    ids = torch.randint(50, (9,), generator=generator)
    log_probs, entropy = log_probs_and_entropy(tensors[0], OutputLayer(*tensors[1:]), ids, temperature=0.9)
    total = (log_probs + entropy).sum()
    first = torch.autograd.grad(total, tensors, retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(total, tensors), strict=True):
        assert torch.equal(one, other)
