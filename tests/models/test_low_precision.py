"""Passes in 16 bits: gradients of weights that stay float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from strop.models.passes.low_precision import _add, low_precision

VOCABULARY, HIDDEN = 700, 512  # more numbers than are cast at once


class Tied(nn.Module):
    """Scores of the next word by the embedding itself, with a scale per feature and one for all."""

    def __init__(self, padding_id: int | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, padding_idx=padding_id)
        self.features = nn.Linear(HIDDEN, HIDDEN)
        self.output = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.output.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.output(self.features(self.embedding(ids)) * self.scale)


@pytest.mark.parametrize("padding_id", [None, 3])
def test_gradients_of_several_passes_are_those_of_float32(padding_id):
    torch.manual_seed(0)
    model = Tied(padding_id)
    passes = torch.randint(0, 9, (3, 2, 40))  # every word several times
    weights = torch.randn(3, 2, 40, VOCABULARY)

    def run() -> None:
        for ids, weight in zip(passes, weights, strict=True):
            (model(ids).float() * weight).sum().backward()

    run()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    with low_precision(model, torch.bfloat16), low_precision(model, torch.bfloat16):
        assert model.embedding(passes[0]).dtype == torch.bfloat16
        run()
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float32
        error = (parameter.grad - expected[name]).norm() / expected[name].norm()
        assert error < 0.01, name
    assert "forward" not in vars(model.embedding)


@pytest.mark.parametrize("padding_id", [None, 3])
def test_an_embedding_adds_rows_to_its_gradient(padding_id):
    """As torch's embedding does, with the same gradient in float32."""
    model = nn.Sequential(nn.Embedding(11, 4, padding_idx=padding_id))
    ids, weights = torch.randint(0, 5, (2, 6)), torch.randn(2, 6, 4).bfloat16().float()
    for _ in range(2):
        (model(ids) * weights).sum().backward()
    expected = model[0].weight.grad
    model.zero_grad()
    with low_precision(model, torch.bfloat16):
        assert "forward" in vars(model[0])
        for _ in range(2):
            (model(ids).float() * weights).sum().backward()
        model(ids[:, :0]).sum().backward()
    torch.testing.assert_close(model[0].weight.grad, expected, rtol=1e-6, atol=1e-6)


class Scaled(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 8


@pytest.mark.parametrize(
    "embedding",
    [
        Scaled(11, 4),
        nn.Embedding(11, 4, scale_grad_by_freq=True),
        nn.Embedding(11, 4, max_norm=0.5),
        nn.Embedding(11, 4, sparse=True),
    ],
)
def test_other_embeddings_compute_as_they_do(embedding):
    ids = torch.tensor([[1, 2, 2]])
    embedding(ids).sum().backward()
    expected = embedding.weight.grad
    embedding.zero_grad()
    if embedding.max_norm is not None:  # the first pass has shortened rows
        embedding.weight.data.mul_(4)
    with low_precision(nn.Sequential(embedding), torch.bfloat16):
        embedding(ids).sum().backward()
    assert embedding.weight.grad.layout == expected.layout
    assert torch.equal(embedding.weight.grad.to_dense(), expected.to_dense())
    assert embedding.max_norm is None or embedding.weight[2].norm() <= 0.5 + 1e-6


def test_hooks_get_the_gradients_of_every_use():
    """Of an embedding that is the output layer too."""
    torch.manual_seed(0)
    model = Tied(None)
    kept = (torch.arange(VOCABULARY) >= 5).float()[:, None]
    model.embedding.weight.register_hook(lambda gradient: gradient * kept)
    model.features.weight.register_hook(lambda gradient: gradient * 2)
    ids, weights = torch.randint(0, 9, (2, 40)), torch.randn(2, 40, VOCABULARY)
    (model(ids) * weights).sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    with low_precision(model, torch.bfloat16):
        (model(ids).float() * weights).sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad - expected[name]).norm() < 0.01 * expected[name].norm(), name
    assert not model.embedding.weight.grad[:5].any()


def test_a_hook_gets_the_gradient():
    """Such as one that trains some words only."""
    model = nn.Sequential(nn.Embedding(11, 4))
    model[0].weight.register_hook(lambda gradient: gradient * (torch.arange(11) > 1)[:, None])
    with low_precision(model, torch.bfloat16):
        model(torch.tensor([1, 2])).sum().backward()
    assert model[0].weight.grad.sum(1).tolist() == [0, 0, 4, *[0] * 8]


@pytest.mark.parametrize("size", [3, VOCABULARY])
def test_gradients_are_added_in_any_layout(size):
    gradient, total = torch.randn(2, size, HIDDEN)
    gradient = gradient.bfloat16()
    for one in (gradient, gradient.t().contiguous().t(), gradient[:, :1].expand(-1, HIDDEN)):
        for other in (total, total.t().contiguous().t()):
            found = other.clone()
            _add(one, found)
            assert torch.equal(found, total + one.float())


def test_a_frozen_embedding_gets_no_gradient():
    model = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 3)).requires_grad_(False)
    model[1].requires_grad_(True)
    with low_precision(model, torch.bfloat16):
        model(torch.tensor([1, 2])).sum().backward()
    assert model[0].weight.grad is None
    assert model[1].weight.grad is not None
