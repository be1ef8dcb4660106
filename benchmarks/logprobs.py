"""Measure memory and time of log-probs and entropies without materialised logits, by vocabulary size.

    python benchmarks/logprobs.py [--rounds 3] [--tokens 4096] [--hidden 896] [--vocabularies 9496 ...]
                                  [--dtype bfloat16]

Log-probs, entropies and their gradients with respect to hidden states and output layer, on one CPU thread, in
float32 or with bfloat16 autocast. Two implementations alternate: with all logits (log_softmax, gather,
-sum p log p and autograd), and in blocks of the vocabulary (strop.algorithms.output_layer). Each measurement
is a separate process. Memory is the process's peak above its inputs and their gradients; seconds are CPU
time. Figures are medians over the rounds, ratios are ratios of medians.

Logits of 4096 tokens and 151,936 words take 2.5 GB per copy, and several copies exist at once: the
implementation with all logits is skipped where they do not fit into free memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from machine import description
from torch import Tensor

from strop.algorithms.output_layer import OutputLayer, log_probs_and_entropy

WAYS = ("all logits", "in blocks")
_COPIES = 7
"""Copies of the logits at the peak of the implementation with all logits, plus a reserve."""
MIB = 2**20


def with_all_logits(hidden_NH: Tensor, weight_VH: Tensor, ids_N: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log-probs and entropies by the textbook formula."""
    log_p_NV = torch.log_softmax((hidden_NH @ weight_VH.t()).float(), dim=-1)
    return log_p_NV.gather(1, ids_N[:, None])[:, 0], -(log_p_NV.exp() * log_p_NV).sum(dim=-1)


def in_blocks(hidden_NH: Tensor, weight_VH: Tensor, ids_N: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log-probs and entropies as strop's policy does."""
    return log_probs_and_entropy(hidden_NH, OutputLayer(weight_VH), ids_N, temperature=1.0)


def measure(way: str, dtype: str, tokens: int, hidden: int, vocabulary: int) -> dict[str, float]:
    """Measure CPU seconds and MiB in this process; also return gradient norms for comparison."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden_NH = torch.randn(tokens, hidden)
    weight_VH = torch.randn(vocabulary, hidden) / hidden**0.5
    ids_N = torch.randint(vocabulary, (tokens,))
    upstream_2N = torch.randn(2, tokens)
    gradients = [torch.ones_like(hidden_NH), torch.ones_like(weight_VH)]  # written: pages are resident
    torch.mm(hidden_NH[:64], weight_VH[:64].t())  # allocates the library's buffers
    inputs = resident()
    del gradients
    reset_peak()
    for tensor in (hidden_NH, weight_VH):
        tensor.requires_grad_()
    function = with_all_logits if way == "all logits" else in_blocks
    start = time.process_time()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        log_probs_N, entropy_N = function(hidden_NH, weight_VH, ids_N)
    (log_probs_N * upstream_2N[0] + entropy_N * upstream_2N[1]).sum().backward()
    seconds, memory = time.process_time() - start, (peak() - inputs) / MIB
    found = [hidden_NH.grad, weight_VH.grad]
    norms = [float(gradient.double().norm()) for gradient in found if gradient is not None]
    return {"seconds": seconds, "memory": memory, "hidden": norms[0], "weight": norms[1]}


def resident() -> int:
    """Return this process's resident bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def reset_peak() -> None:
    """Reset the kernel's peak counter that ``peak`` reads."""
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Return the peak of resident bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    return int(line.split()[1]) * 1024


def available() -> int:
    """Return the bytes of available memory."""
    (line,) = (line for line in Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in line)
    return int(line.split()[1]) * 1024


def in_own_process(way: str, dtype: str, tokens: int, hidden: int, vocabulary: int) -> dict[str, float]:
    """Run ``measure`` in a new process."""
    sizes = [str(size) for size in (tokens, hidden, vocabulary)]
    command = [sys.executable, __file__, "--measure", way, dtype, *sizes]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


def compare(
    dtype: str, tokens: int, hidden: int, vocabulary: int, rounds: int
) -> dict[str, dict[str, float] | None]:
    """Return the medians of each implementation; None for one that does not fit into memory."""
    needed = _COPIES * 4 * tokens * vocabulary
    ways = [way for way in WAYS if way == "in blocks" or needed < available()]
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            found[way].append(in_own_process(way, dtype, tokens, hidden, vocabulary))
    medians = {
        way: {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        for way, runs in found.items()
    }
    return {way: medians.get(way) for way in WAYS}


def row(vocabulary: int, found: dict[str, dict[str, float] | None]) -> str:
    """Format a Markdown table row."""
    whole, blocks = (found[way] for way in WAYS)
    assert blocks is not None  # it always fits
    cells = [f"{vocabulary:,}", f"{blocks['seconds']:.2f}", f"{blocks['memory']:,.0f}"]
    if whole is None:
        cells[1:1], cells[3:3] = ["does not fit"], ["does not fit"]
        return "| " + " | ".join([*cells, "", ""]) + " |"
    apart = max(abs(whole[name] / blocks[name] - 1) for name in ("hidden", "weight"))
    cells[1:1] = [f"{whole['seconds']:.2f}"]
    cells[3:3] = [f"{whole['memory']:,.0f}"]
    cells += [f"{blocks['seconds'] / whole['seconds']:.2f}", f"{apart:.0e}"]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[9_496, 37_984, 151_936])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--measure", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        way, dtype, *sizes = args.measure
        print(json.dumps(measure(way, dtype, *map(int, sizes))))
        return
    print(description("torch", threads=1))
    print(f"{args.tokens} tokens, hidden {args.hidden}, {args.dtype}, medians of {args.rounds}\n")
    print("| words | s, all logits | s, in blocks | MiB, all logits | MiB, in blocks | ratio | norms apart |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for vocabulary in args.vocabularies:
        print(
            row(vocabulary, compare(args.dtype, args.tokens, args.hidden, vocabulary, args.rounds)),
            flush=True,
        )


if __name__ == "__main__":
    main()
