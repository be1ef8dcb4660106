"""Measure what the sum over blocks of the vocabulary does to gradients and to training in bfloat16.

    python benchmarks/accumulation.py [--updates 100] [--vocabulary 151936] [--width 256]

A policy without layers (a matrix, a norm and an output layer, float32 weights under bfloat16 autocast) takes
policy-gradient steps with an entropy bonus, once with each way to sum the gradient of the hidden states over
the blocks of ``strop.algorithms.output_layer``:

    float32             operands and products of blocks in float32
    bfloat16 operands   rounded logits' gradients, products in float32 (the output layer on a GPU)
    rounded products    products rounded to bfloat16, summed in float32 (the output layer on a CPU, but it
                        multiplies chunks of many blocks)
    bfloat16 sum        products rounded to bfloat16, summed in bfloat16
    all logits          one product over the whole vocabulary, rounded once: a linear layer under autograd

First along the steps of ``float32``: relative distance of each hidden gradient from the float64 product of
the same logits' gradients, and its part along that gradient (the bias: -1e-3 means 0.1% too small).
``predicted`` is the distance by arithmetic, from independent roundings of relative size 1.7e-3 (the root mean
square of rounding to 8 bits) of the logits' gradients, of every product, and of every partial sum or the
total. Then each way trains from the same start with the same random numbers; ``other seed`` is ``float32``
with other samples, the scale of all differences; weights apart: their distance from those of ``float32``,
over the distance that these moved.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from machine import description
from torch import Tensor
from torch.nn import functional

from strop.algorithms import output_layer
from strop.algorithms.output_layer import OutputLayer, log_probs_and_entropy

ROUNDING = 2**-7 * (0.375 / (12 * math.log(2))) ** 0.5
"""Root mean square of bfloat16's relative rounding error, for mantissas that are uniform in log scale."""
BLOCKS: dict[str, Callable[[Tensor, Tensor, Tensor], None]] = {}
ALL_LOGITS = "all logits"
ENTROPY_COEFF = 0.01
SHARPNESS = 4.0
"""Standard deviation of the logits at the start; with 151,936 words the entropy is then about 4 nats."""


def way(name: str) -> Callable:
    """Register a function (a, b, total): total += a @ b."""

    def register(function: Callable) -> Callable:
        BLOCKS[name] = function
        return function

    return register


@way("float32")
def _float32(a: Tensor, b: Tensor, total: Tensor) -> None:
    total.addmm_(a, b.float())


@way("bfloat16 operands")
def _rounded_operands(a: Tensor, b: Tensor, total: Tensor) -> None:
    total.addmm_(a.to(b.dtype).float(), b.float())


@way("rounded products")
def _rounded(a: Tensor, b: Tensor, total: Tensor) -> None:
    total += a.to(b.dtype) @ b


@way("bfloat16 sum")
def _sum_in_bfloat16(a: Tensor, b: Tensor, total: Tensor) -> None:
    total.copy_((total.to(b.dtype) + a.to(b.dtype) @ b).float())


SQUARES = {"operands": 0.0, "products": 0.0, "sums": 0.0}
"""Sums of squares over the blocks of one backward pass, which ``float64`` collects for the prediction."""


@way("float64")
def _float64(a: Tensor, b: Tensor, total: Tensor) -> None:
    a, b = a.double(), b.double()
    product = a @ b
    total += product.float()
    SQUARES["operands"] += (a.square() @ b.square().sum(1)).sum().item()
    SQUARES["products"] += product.square().sum().item()
    SQUARES["sums"] += total.double().square().sum().item()


@contextmanager
def summed(name: str, width: int, tokens: int) -> Iterator[None]:
    """Use another way to sum, and blocks of ``width`` words."""
    settings = {
        "_add_product": BLOCKS.get(name, output_layer._add_product),
        "_BLOCK_ON_CPU": width * tokens,
        "_CHUNK_ON_CPU": 0,  # a block is a chunk
        "_KEPT": 0,
    }
    with mock.patch.multiple(output_layer, **settings):
        yield


class Policy:
    """Contexts [N, D], a matrix [D, H], a norm and an output layer [V, H]."""

    def __init__(self, tokens: int, hidden: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        self.contexts_ND = draw(tokens, hidden)
        self.good_V = torch.rand(vocabulary, generator=generator) < 0.5
        self.matrix_DH = (draw(hidden, hidden) / hidden**0.5).requires_grad_()
        self.weight_VH = (draw(vocabulary, hidden) * SHARPNESS / hidden**0.5).requires_grad_()

    def hidden(self) -> Tensor:
        """Return hidden states [N, H]."""
        return functional.rms_norm(self.contexts_ND @ self.matrix_DH, self.matrix_DH.shape[1:])

    @torch.no_grad()
    def sample(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return sampled ids [N] and whitened rewards [N]: 1 for the words of a fixed random half."""
        logits_NV = self.hidden() @ self.weight_VH.t()
        uniform_NV = torch.rand(logits_NV.shape, generator=generator).clamp_(min=1e-30)
        ids_N = (logits_NV - uniform_NV.log_().neg_().log_()).argmax(1)
        rewards_N = self.good_V[ids_N].double()
        return ids_N, ((rewards_N - rewards_N.mean()) / (rewards_N.std() + 1e-6)).float()


def loss_and_entropy(name: str, hidden_NH: Tensor, weight_VH: Tensor, ids_N: Tensor, advantages_N: Tensor):
    """Return the loss, and the mean entropy."""
    with torch.autocast("cpu", torch.bfloat16):
        if name == ALL_LOGITS:
            log_p_NV = functional.linear(hidden_NH, weight_VH).float().log_softmax(-1)
            log_prob_N = log_p_NV.gather(1, ids_N[:, None])[:, 0]
            entropy_N = -(log_p_NV.exp() * log_p_NV).sum(-1)
        else:
            layer = OutputLayer(weight_VH)
            log_prob_N, entropy_N = log_probs_and_entropy(hidden_NH, layer, ids_N, temperature=1.0)
    entropy = entropy_N.mean()
    return -(advantages_N * log_prob_N).mean() - ENTROPY_COEFF * entropy, entropy.item()


def errors(policy: Policy, ids_N: Tensor, advantages_N: Tensor, width: int) -> dict[str, tuple[float, ...]]:
    """Return distance, predicted distance and bias of the hidden gradient, by way."""
    gradients = {}
    SQUARES.update(dict.fromkeys(SQUARES, 0.0))
    weight_VH = policy.weight_VH.detach()
    for name in (*BLOCKS, ALL_LOGITS):
        hidden_NH = policy.hidden().detach().requires_grad_()
        with summed(name, width, len(ids_N)):
            loss_and_entropy(name, hidden_NH, weight_VH, ids_N, advantages_N)[0].backward()
        assert hidden_NH.grad is not None
        gradients[name] = hidden_NH.grad.double()
    exact = gradients.pop("float64")
    square = exact.square().sum().item()
    operands, products, sums = SQUARES.values()
    rounded = {
        "float32": 0.0,
        "bfloat16 operands": operands,
        "rounded products": operands + products,
        "bfloat16 sum": operands + products + sums,
        ALL_LOGITS: operands + square,
    }
    return {
        name: (
            (found - exact).norm().item() / square**0.5,
            ROUNDING * (rounded[name] / square) ** 0.5,
            ((found - exact) * exact).sum().item() / square,
        )
        for name, found in gradients.items()
    }


def train(args: argparse.Namespace, name: str, *, seed: int = 0, measure: bool = False):
    """Return the entropy before each update, the weights afterwards, and the errors of each update."""
    policy = Policy(args.tokens, args.hidden, args.vocabulary)
    weights = [policy.matrix_DH, policy.weight_VH]
    optimizer = torch.optim.AdamW(weights, lr=args.lr, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    entropies, found = [], []
    for _ in range(args.updates):
        ids_N, advantages_N = policy.sample(generator)
        if measure:
            found.append(errors(policy, ids_N, advantages_N, args.width))
        with summed(name, args.width, args.tokens):
            loss, entropy = loss_and_entropy(name, policy.hidden(), policy.weight_VH, ids_N, advantages_N)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        entropies.append(entropy)
    return torch.tensor(entropies, dtype=torch.float64), policy.matrix_DH.detach().double(), found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument(
        "--width", type=int, default=256, help="words per block: 4096 tokens on a CPU have 256"
    )
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(description("torch", threads=1))
    blocks = math.ceil(args.vocabulary / args.width)
    print(
        f"{args.vocabulary:,} words in {blocks} blocks, {args.tokens} tokens, hidden {args.hidden}, ", end=""
    )
    print(f"{args.updates} updates\n", flush=True)
    entropies, matrix, found = train(args, "float32", measure=True)
    start = Policy(args.tokens, args.hidden, args.vocabulary).matrix_DH.detach().double()
    moved = (matrix - start).norm()
    print(f"float32: entropy {entropies[0]:.3f} -> {entropies[-1]:.3f} nats\n", flush=True)
    print("| sum over blocks | distance | predicted | bias | entropy apart: mean | largest | weights apart |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name in (*(name for name in BLOCKS if name != "float64"), ALL_LOGITS, "other seed"):
        cells = ["", "", ""]
        if name != "other seed":
            of_way = torch.tensor([each[name] for each in found], dtype=torch.float64)
            distance, predicted, bias = of_way.mean(0)
            error = of_way[:, 2].std() / len(of_way) ** 0.5
            cells = [f"{distance:.1e}", f"{predicted:.1e}", f"{bias:+.1e} ± {error:.0e}"]
        if name == "float32":
            apart, its_matrix = torch.zeros_like(entropies), matrix
        else:
            seed, trained = (1, "float32") if name == "other seed" else (0, name)
            its_entropies, its_matrix, _ = train(args, trained, seed=seed)
            apart = its_entropies - entropies
        cells += [
            f"{apart.mean():+.1e}",
            f"{apart.abs().max():.1e}",
            f"{(its_matrix - matrix).norm() / moved:.1e}",
        ]
        print("| " + " | ".join([name, *cells]) + " |", flush=True)


if __name__ == "__main__":
    main()
