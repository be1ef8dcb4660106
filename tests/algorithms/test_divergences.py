"""Divergences in blocks of the vocabulary, against float64 by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from strop.algorithms import output_layer
from strop.algorithms.distillation import chosen_log_probs, compare, cut, divergence, top_words
from strop.algorithms.output_layer import OutputLayer

KINDS = ("reverse", "forward", "js")
N, H, H_TEACHER, V = 7, 6, 10, 300


def by_definition(p: Tensor, q: Tensor, kind: str, b: float) -> Tensor:
    """Compute from probabilities [..., V], in float64."""

    def kl(one: Tensor, other: Tensor) -> Tensor:
        return torch.where(one > 0, one * (one.log() - other.log()), 0.0).sum(-1)

    if kind == "js":
        mixture = b * p + (1 - b) * q
        return b * kl(p, mixture) + (1 - b) * kl(q, mixture)
    return kl(p, q) if kind == "forward" else kl(q, p)


def case(seed: int = 0, width: int = H_TEACHER) -> tuple[Tensor, OutputLayer, Tensor, OutputLayer]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    layer = OutputLayer(draw(V, H).requires_grad_(), draw(V).requires_grad_(), scale=0.9, soft_cap=8.0)
    return draw(N, H).requires_grad_(), layer, draw(N, width), OutputLayer(draw(V, width))


def probabilities(hidden: Tensor, layer: OutputLayer, temperature: float) -> Tensor:
    wide = OutputLayer(
        layer.weight_VH.detach().double(),
        None if layer.bias_V is None else layer.bias_V.detach().double(),
        layer.scale,
        layer.soft_cap,
    )
    return (wide(hidden.double()) / temperature).softmax(-1)


SIZES = {"blocks": (64, 1 << 28), "one block": (1 << 20, 1 << 28), "room for two rows": (64, 4 * V * 2)}


@pytest.fixture(params=SIZES.values(), ids=SIZES)
def _sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of a block, and bytes of products that are kept."""
    monkeypatch.setattr(output_layer, "_BLOCK_ON_CPU", request.param[0])
    monkeypatch.setattr(output_layer, "_KEPT", request.param[1])


@pytest.mark.usefixtures("_sizes")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_values_and_gradients(kind: str, temperature: float) -> None:
    hidden, layer, teacher_hidden, teacher_layer = case()
    found = compare(
        *(hidden, layer, teacher_hidden, teacher_layer), kind=kind, js_weight=0.3, temperature=temperature
    )
    upstream = torch.linspace(0.5, 2, N)
    gradients = torch.autograd.grad(
        (found.divergence_N * upstream).sum(), [hidden, layer.weight_VH, layer.bias_V]
    )

    inputs = [x.detach().double().requires_grad_() for x in (hidden, layer.weight_VH, layer.bias_V)]
    wide = OutputLayer(inputs[1], inputs[2], layer.scale, layer.soft_cap)
    q = (wide(inputs[0]) / temperature).softmax(-1)
    p = probabilities(teacher_hidden, teacher_layer, temperature)
    expected = by_definition(p, q, kind, 0.3)
    torch.testing.assert_close(found.divergence_N.double(), expected.detach(), atol=2e-6, rtol=2e-6)
    wanted = torch.autograd.grad((expected * upstream).sum(), inputs)
    for ours, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=2e-5, rtol=2e-5)
    assert torch.equal(found.agrees_N.bool(), p.argmax(-1) == q.argmax(-1))


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        made = [one for one in tree_leaves(found) if isinstance(one, Tensor)]
        self.most = max([self.most, *(one.untyped_storage().nbytes() // one.element_size() for one in made)])
        return found


@pytest.mark.parametrize("kind", [*KINDS, "top 64"])
def test_no_tensor_of_tokens_by_vocabulary_is_made(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the vocabulary of Qwen2.5, with room for the products of a few rows only."""
    monkeypatch.setattr(output_layer, "_KEPT", 1 << 20)
    n, vocabulary = 64, 151_936
    draw = torch.Generator().manual_seed(0)
    hidden, states = (torch.randn(n, width, generator=draw) for width in (8, 12))
    layer, teacher = (OutputLayer(torch.randn(vocabulary, width, generator=draw)) for width in (8, 12))
    hidden.requires_grad_()
    layer.weight_VH.requires_grad_()
    with Largest() as largest:
        if kind == "top 64":
            ids, top = top_words(states, teacher, 64, temperature=1.0)
            found = divergence(top, chosen_log_probs(hidden, layer, ids, temperature=1.0)[0], "forward")
        else:
            options = {"kind": kind, "js_weight": 0.5, "temperature": 1.0}
            found = compare(hidden, layer, states, teacher, **options).divergence_N
        found.sum().backward()
    assert largest.most <= vocabulary * 12 < n * vocabulary  # a gradient of the larger output layer


@pytest.mark.parametrize("kind", KINDS)
def test_each_logit_is_computed_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mixture needs both log-sums, so js reads all logits twice; the second time they are there."""
    monkeypatch.setattr(output_layer, "_BLOCK_ON_CPU", 64)
    monkeypatch.setattr(output_layer, "_KEPT", 4 * V * 2)
    product, counted = output_layer._product, [0]

    def count(left: Tensor, right: Tensor, out: Tensor) -> None:
        counted[0] += left.shape[0] * right.shape[1]
        product(left, right, out)

    monkeypatch.setattr(output_layer, "_product", count)
    hidden, layer, teacher_hidden, teacher_layer = case()
    compare(hidden, layer, teacher_hidden, teacher_layer, kind=kind, js_weight=0.3, temperature=1.0)
    assert counted[0] == 2 * N * V  # of student and teacher


@pytest.mark.usefixtures("_sizes")
@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_that_is_the_student_gives_exactly_nothing(kind: str) -> None:
    hidden, layer, *_ = case()
    found = compare(hidden, layer, hidden, layer, kind=kind, js_weight=0.5, temperature=0.7)
    assert not found.divergence_N.any()
    assert found.agrees_N.all()
    for gradient in torch.autograd.grad(found.divergence_N.sum(), [hidden, layer.weight_VH]):
        assert not gradient.any()


@pytest.mark.usefixtures("_sizes")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 5, V])
def test_top_words_with_one_for_all_others(kind: str, k: int) -> None:
    hidden, layer, teacher_hidden, teacher_layer = case()
    ids, teacher = top_words(teacher_hidden, teacher_layer, k, temperature=0.8)
    student, best = chosen_log_probs(hidden, layer, ids, temperature=0.8)
    found = divergence(teacher, student, kind, 0.3)
    gradients = torch.autograd.grad(found.sum(), [hidden, layer.weight_VH, layer.bias_V])

    inputs = [x.detach().double().requires_grad_() for x in (hidden, layer.weight_VH, layer.bias_V)]
    q = (OutputLayer(inputs[1], inputs[2], layer.scale, layer.soft_cap)(inputs[0]) / 0.8).softmax(-1)
    p = probabilities(teacher_hidden, teacher_layer, 0.8)
    assert torch.equal(ids, p.topk(k).indices)
    assert torch.equal(best, q.argmax(-1))
    others = torch.ones_like(p).scatter(1, ids, 0)
    pair = [torch.cat([x.gather(1, ids), (x * others).sum(1, keepdim=True)], 1) for x in (p, q)]
    pair = [x[:, : min(k + 1, V)] for x in pair]
    expected = by_definition(pair[0], pair[1], kind, 0.3)
    torch.testing.assert_close(found.double(), expected.detach(), atol=2e-6, rtol=2e-6)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected.sum(), inputs), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=2e-5, rtol=2e-5)
    full = compare(
        hidden, layer, teacher_hidden, teacher_layer, kind=kind, js_weight=0.3, temperature=0.8
    ).divergence_N
    assert (found <= full * (1 + 1e-6) + 1e-6).all()
    if k == V:
        torch.testing.assert_close(found, full, atol=2e-6, rtol=2e-6)


def test_forbidden_words_and_far_distributions_are_finite() -> None:
    hidden, layer, teacher_hidden, _ = case()
    bias = torch.zeros(V).index_fill(0, torch.arange(5), -torch.inf)
    forbidding = OutputLayer(torch.randn(V, H_TEACHER) * 50, bias)
    for kind in KINDS:
        found = compare(
            hidden, layer, teacher_hidden, forbidding, kind=kind, js_weight=0.5, temperature=1.0
        ).divergence_N
        assert found.isfinite().all()
        assert (found >= 0).all()
        assert torch.autograd.grad(found.sum(), hidden)[0].isfinite().all()


@pytest.mark.parametrize("kind", ["reverse", "forward"])
@pytest.mark.parametrize("k", [3, V])
def test_top_words_of_far_distributions_are_not_clamped(kind: str, k: int) -> None:
    """Log-probs of -3,000, as at a temperature of 0.01, have their value and their gradient."""
    p, q = torch.zeros(1, V), torch.zeros(1, V, requires_grad=True)
    p[0, 0], words = 3000.0, OutputLayer(torch.eye(V))
    with torch.no_grad():
        q[0, 1] = 3000.0
    ids, teacher = top_words(p, words, k, temperature=1.0)
    found = divergence(teacher, chosen_log_probs(q, words, ids, temperature=1.0)[0], kind)
    assert float(found.detach()) == pytest.approx(3000, rel=1e-6)
    (gradient,) = torch.autograd.grad(found.sum(), q)
    expected = [-1.0, 1.0, 0.0] if kind == "forward" else [0.0, 0.0, 0.0]
    assert gradient[0, :3].tolist() == pytest.approx(expected, abs=1e-6)


def test_layers_are_cut_to_equal_words() -> None:
    hidden, layer, teacher_hidden, teacher_layer = case()
    assert len(cut(layer, 250).weight_VH) == len(cut(layer, 250).bias_V) == 250
    assert cut(layer, V) is layer
    with pytest.raises(ValueError, match="300 words and 250"):
        compare(
            *(hidden, layer, teacher_hidden, cut(teacher_layer, 250)),
            **{"kind": "reverse", "js_weight": 0.5, "temperature": 1.0},
        )
