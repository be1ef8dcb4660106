"""Triton kernels of the output layer, in Triton's interpreter, against whole logits in float64.

The interpreter has to be chosen before triton is imported, so this file runs itself in a fresh process,
which computes all cases.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from strop.algorithms import output_layer
from strop.algorithms.output_layer import OutputLayer, log_probs_and_entropy

ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Largest relative error of rounding to nearest, of half a unit in the last place."""


@dataclass(frozen=True)
class Case:
    """Sizes, layer and dtype of a computation."""

    tokens: int = 24  # two tiles, the last one incomplete
    hidden: int = 24  # two steps, the last one incomplete
    vocabulary: int = 100  # four tiles, the last one incomplete
    temperature: float = 1.0
    scale: float = 1.0
    soft_cap: float | None = None
    with_bias: bool = False
    forbidden: int = 0  # the first words have a bias of -inf
    cut: int = 50  # words of the first of two ranks
    used: tuple[int, ...] = (0, 1)  # outputs with a gradient: log-probs, entropy
    trained: tuple[int, ...] = (0, 1, 2)  # hidden states, weight, bias
    dtype: torch.dtype = torch.float32
    autocast: bool = False  # float32 tensors, products of ``dtype``
    transposed: bool = False  # hidden states and weight are not contiguous
    split: int = 2048
    chunk: int = 1 << 27
    tile: tuple[int, ...] = (16, 32, 16, 4, 1)

    def tensors(self) -> tuple[list[Tensor], Tensor, Tensor]:
        """Return hidden states, weight and bias, ids, and the gradients of both outputs."""
        chance = torch.Generator().manual_seed(self.tokens + self.vocabulary)
        shapes = [(self.tokens, self.hidden), (self.vocabulary, self.hidden), (self.vocabulary,)]
        hidden, weight, bias = (torch.randn(shape, generator=chance) for shape in shapes)
        bias[: self.forbidden] = -math.inf
        tensors = [hidden, weight * 2 / self.hidden**0.5, *([bias] if self.with_bias else [])]
        ids = torch.randint(self.forbidden, self.vocabulary, (self.tokens,), generator=chance)
        kind = torch.float32 if self.autocast else self.dtype
        return [tensor.to(kind) for tensor in tensors], ids, torch.randn(2, self.tokens, generator=chance)


CASES = {
    "float32": Case(),
    "temperature": Case(temperature=0.6),
    "scale": Case(temperature=1.3, scale=0.4),
    "soft cap": Case(temperature=0.8, scale=1.5, soft_cap=3.0, with_bias=True),
    "wide soft cap": Case(soft_cap=50.0),
    "bias": Case(with_bias=True, temperature=0.9),
    "forbidden tiles": Case(with_bias=True, forbidden=70),
    "capped forbidden words": Case(with_bias=True, forbidden=10, soft_cap=4.0),
    "whole steps": Case(tokens=32, hidden=48, vocabulary=64),
    "one of each": Case(tokens=1, hidden=1, vocabulary=1, with_bias=True),
    "one token": Case(tokens=1, hidden=16, vocabulary=33),
    "no token": Case(tokens=0, with_bias=True),
    "splits and chunks": Case(split=64, chunk=24 * 64, vocabulary=300, with_bias=True),
    "log-probs alone": Case(used=(0,), with_bias=True),
    "entropy alone": Case(used=(1,), with_bias=True),
    "frozen weight": Case(trained=(0,), with_bias=True),
    "frozen hidden states": Case(trained=(1, 2), with_bias=True),
    "not contiguous": Case(transposed=True),
    "tiles of a GPU": Case(tokens=130, hidden=70, vocabulary=300, tile=(128, 256, 64, 8, 3)),
    "vocabulary of Qwen2.5": Case(tokens=3, hidden=16, vocabulary=151_936, tile=(16, 2048, 16, 4, 1)),
    "bfloat16": Case(dtype=torch.bfloat16, temperature=0.7),
    "bfloat16, bias and soft cap": Case(dtype=torch.bfloat16, with_bias=True, soft_cap=5.0),
    "bfloat16, autocast": Case(
        dtype=torch.bfloat16, autocast=True, split=32, chunk=24 * 64, vocabulary=200, with_bias=True
    ),
    "float16": Case(dtype=torch.float16, temperature=1.5),
}
OVER_RANKS = {
    "float32": Case(with_bias=True, temperature=0.8),
    "forbidden rank": Case(with_bias=True, forbidden=55),
    "few words": Case(vocabulary=3, cut=1),  # ids of rank 1 are columns of rank 0 past its last word
    "no words": Case(cut=0),
    "bfloat16": Case(dtype=torch.bfloat16),
}


def kernel(case: Case, words: slice = slice(None), group: Any = None) -> list[Tensor | None]:
    """Return log-probs, entropies and gradients by the kernels, with ``words`` on this rank."""
    from strop.algorithms import output_kernel

    output_kernel.WORDS, output_layer._CHUNK = case.split, case.chunk
    output_kernel._INTERPRETED = output_kernel._Tile(*case.tile)
    leaves, ids, upstream = case.tensors()
    leaves = [leaves[0], *(leaf[words] for leaf in leaves[1:])]
    if case.transposed:
        leaves = [leaf.t().contiguous().t() for leaf in leaves]
    for number, leaf in enumerate(leaves):
        leaf.requires_grad_(number in case.trained)
    bias = leaves[2] if case.with_bias else None
    layer = OutputLayer(leaves[1], bias, case.scale, case.soft_cap, words.start or 0, group)
    with torch.autocast("cpu", case.dtype, enabled=case.autocast):
        outputs = log_probs_and_entropy(leaves[0], layer, ids, temperature=case.temperature)
    assert output_layer._has_kernel(torch.device("cpu"), case.dtype)
    sum((outputs[number] * upstream[number]).sum() for number in case.used).backward()
    return [*(output.detach() for output in outputs), *(leaf.grad for leaf in leaves)]


def first_tokens(count: int) -> list[Tensor]:
    leaves, ids, _ = Case().tensors()
    return list(
        log_probs_and_entropy(leaves[0][:count], OutputLayer(leaves[1]), ids[:count], temperature=1.0)
    )


def rank(number: int, out: str) -> None:
    """Compute with all words up to ``Case.cut`` on rank 0, and the others on rank 1."""
    dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=number, world_size=2)
    results = {}
    for name, case in OVER_RANKS.items():
        words = slice(case.cut, case.vocabulary) if number else slice(0, case.cut)
        results[name] = kernel(case, words, dist.group.WORLD)
    torch.save(results, f"{out}.{number}")
    dist.destroy_process_group()


def main(out: str) -> None:
    torch.set_num_threads(1)
    results: dict[str, Any] = {name: kernel(case) for name, case in CASES.items()}
    torch.save(results | {"first": [first_tokens(8), first_tokens(24)]}, out)
    fork = multiprocessing.get_context("fork")  # without another import of torch
    ranks = [fork.Process(target=rank, args=(number, out)) for number in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
        assert process.exitcode == 0


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    if sys.platform != "linux":
        pytest.skip("Triton is published for Linux only")
    if find_spec("triton") is None:
        pytest.fail("These tests need triton: pip install 'strop[dev]'")
    path = tmp_path_factory.mktemp("kernel") / "results"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, str(path)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return path


@pytest.fixture(scope="module")
def found(out):
    return torch.load(out)


def exact(case: Case, *, rounds: bool = True) -> list[Tensor]:
    """Return what ``kernel`` does, in float64, with whole logits that are rounded as a linear layer's are."""
    leaves, ids, upstream = case.tensors()
    leaves = [leaf.to(case.dtype) if number < 2 else leaf for number, leaf in enumerate(leaves)]
    leaves = [leaf.double().requires_grad_(number in case.trained) for number, leaf in enumerate(leaves)]
    products = leaves[0] @ leaves[1].t()
    if rounds and case.dtype != torch.float32:
        products = products + (products.detach().to(case.dtype) - products.detach())
    logits = products + leaves[2] if len(leaves) > 2 else products
    logits = logits * case.scale
    if case.soft_cap is not None:
        logits = torch.tanh(logits / case.soft_cap) * case.soft_cap
    log_p = (logits / case.temperature).log_softmax(-1)
    finite = log_p.masked_fill(log_p == -math.inf, 0.0)
    outputs = log_p.gather(1, ids[:, None])[:, 0], -(finite.exp() * finite * (log_p > -math.inf)).sum(-1)
    sum((outputs[number] * upstream[number].double()).sum() for number in case.used).backward()
    return [*(output.detach() for output in outputs), *(leaf.grad for leaf in leaves)]


def distance(found: Tensor, expected: Tensor) -> float:
    scale = expected.norm()
    return float((found.double() - expected).norm() / scale) if scale > 0 else float(found.double().norm())


def check(case: Case, found: list[Tensor | None]) -> None:
    """Compare outputs to 1e-6 and gradients to 1e-5, and to one rounding where they have 16 bits."""
    wanted = exact(case)
    assert len(found) == len(wanted)
    for number, (ours, truth) in enumerate(zip(found, wanted, strict=True)):
        if truth is None:
            assert ours is None
            continue
        assert ours.shape == truth.shape
        assert ours.isfinite().all()
        bound = 1e-6 if number < 2 else max(1e-5, ROUNDING[case.dtype])
        assert distance(ours, truth) <= bound, (number, distance(ours, truth))


@pytest.mark.fast("vocabulary of Qwen2.5")
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_float64(found, name):
    check(CASES[name], found[name])


def test_the_comparison_finds_a_wrong_temperature(found):
    with pytest.raises(AssertionError):
        check(replace(CASES["temperature"], temperature=0.60001), found["temperature"])


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].dtype != torch.float32])
def test_16_bits_differ_by_one_rounding_of_the_logits(found, name):
    case = CASES[name]
    hidden, weight = (leaf.double() for leaf in case.tensors()[0][:2])
    rounding = ROUNDING[case.dtype] * (hidden @ weight.t()).abs().max() / case.temperature
    for ours, truth in zip(found[name][:2], exact(case, rounds=False)[:2], strict=True):
        assert (ours - truth).abs().max() <= 2 * rounding


@pytest.mark.parametrize("name", OVER_RANKS)
def test_the_vocabulary_may_be_spread_over_ranks(out, name):
    case = OVER_RANKS[name]
    first, second = (torch.load(f"{out}.{number}")[name] for number in range(2))
    for place in range(3):  # log-probs, entropies, and the gradient of the hidden states
        assert torch.equal(first[place], second[place])
    check(case, [*first[:3], *(torch.cat(halves) for halves in zip(first[3:], second[3:], strict=True))])


def test_a_tokens_sums_do_not_depend_on_other_tokens(found):
    few, many = found["first"]
    for ours, theirs in zip(few, many, strict=True):
        assert torch.equal(ours, theirs[: len(ours)])


@pytest.mark.parametrize("failure", ["raises", "differs"])
def test_a_kernel_that_fails_is_not_used(monkeypatch, caplog, failure):
    def difference(device, dtype):
        if failure == "raises":
            raise RuntimeError("Failed to find C compiler")
        return math.nan

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(output_layer, "_difference_of_kernel", difference)
    monkeypatch.setattr(output_layer, "find_spec", lambda name: name)
    uncached = output_layer._has_kernel.__wrapped__
    assert not uncached(torch.device("cpu"), torch.float32)
    assert ("Failed to find C compiler" if failure == "raises" else "differ by nan") in caplog.text


def test_a_kernel_whose_gradients_are_nan_is_not_used(monkeypatch):
    """Its log-probs, which are compared first, are right."""

    class Wrong(output_layer.Blocks):
        def gradient(self, words, upstream, *, with_sums):
            gradient_Nv, sums_v = super().gradient(words, upstream, with_sums=with_sums)
            return gradient_Nv * math.nan, sums_v

    monkeypatch.setattr(output_layer, "_Tiles", Wrong)
    assert math.isnan(output_layer._difference_of_kernel(torch.device("cpu"), torch.float32))


def test_a_cpu_computes_in_blocks(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not output_layer._has_kernel.__wrapped__(torch.device("cpu"), torch.bfloat16)


def spilled(capability: int, ptx: str, folder: Path) -> int:
    """Bytes that a thread stores to memory for want of registers, as ptxas counts them."""
    from triton.backends.nvidia.compiler import get_ptxas

    (folder / "kernel.ptx").write_text(ptx)
    architecture = re.search(r"\.target (sm_\w+)", ptx)[1]
    command = [get_ptxas(capability).path, "-v", f"--gpu-name={architecture}", "kernel.ptx", "-o", "cubin"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return int(re.search(r"(\d+) bytes spill stores", done.stderr)[1])


@pytest.mark.parametrize(
    ("capability", "shared_kib", "instruction", "capped", "most_spilled"),
    [
        (90, 227, "wgmma", False, 8),
        pytest.param(90, 227, "wgmma", True, 0, marks=pytest.mark.slow),
        pytest.param(80, 163, "mma.sync", False, 128, marks=pytest.mark.slow),
        pytest.param(80, 163, "mma.sync", True, 0, marks=pytest.mark.slow),
        pytest.param(89, 99, "mma.sync", False, 0, marks=pytest.mark.slow),
        pytest.param(89, 99, "mma.sync", True, 0, marks=pytest.mark.slow),
        pytest.param(100, 227, "tcgen05.mma", False, 0, marks=pytest.mark.slow),
        pytest.param(100, 227, "tcgen05.mma", True, 1400, marks=pytest.mark.slow),  # of the bias's sums
    ],
)
def test_the_kernels_compile_for_gpus(
    monkeypatch, tmp_path, capability, shared_kib, instruction, capped, most_spilled
):
    """As they are launched with bfloat16, without a GPU; memory and registers are enough for their tiles."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from strop.algorithms import output_kernel

    tile = output_kernel.tile_of(torch.bfloat16, shared_kib << 10, plain=not capped)
    for kernel in (output_kernel._sum_words, output_kernel._differentiate_words):
        constants = output_kernel._constants(1536, capped, capped, tile, interpreted=False)
        options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
        constants |= {"WORDS": output_kernel.WORDS, "HAS_ENTROPY": True, "HAS_SUMS": capped}
        constants |= {} if capped else {"bias_ptr": None, "column_sums_ptr": None}
        kinds = {"hidden_ptr": "*bf16", "weight_ptr": "*bf16", "out_ptr": "*bf16", "ids_ptr": "*i64"}
        signature = {
            name: "constexpr"
            if name in constants
            else kinds.get(
                name,
                "*fp32" if name.endswith("_ptr") else "i32" if name.startswith(("n_", "hidden")) else "fp32",
            )
            for name in kernel.arg_names
        }
        places = {name: (place,) for place, name in enumerate(kernel.arg_names)}
        source = triton.compiler.ASTSource(
            fn=kernel,
            signature=signature,
            constexprs={places[name]: value for name, value in constants.items() if name in places},
            attrs={
                places[name]: [["tt.divisibility", 16]]
                for name in signature
                if signature[name].startswith("*") or name in ("hidden_size", "n_words")
            },
        )
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert compiled.metadata.shared <= shared_kib << 10
        assert instruction in compiled.asm["ptx"]
        assert spilled(capability, compiled.asm["ptx"], tmp_path) <= most_spilled


if __name__ == "__main__":
    main(sys.argv[1])
