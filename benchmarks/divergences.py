"""Measure the time and memory of a teacher's judgement beside the policy's own log-probs.

    python benchmarks/divergences.py [--rounds 3] [--tokens 4096] [--hidden 256 512 896] [--out FILE]

A student and a teacher of equal width over Qwen2.5's vocabulary of 151,936, float32 on one thread: the output
layers alone, forward and backward, since the rest of both models is what it would be without a teacher. "own"
is the policy's pass: log-probs and entropies. Each measurement is a process of its own, and ways alternate.
Memory is the process's peak above its inputs; all logits of one model would take 2.3 GiB at 4,096 tokens.
Seconds are CPU time, medians over the rounds, ratios are medians of a round's ratios.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from machine import description
from torch import Tensor

from strop.algorithms.distillation import chosen_log_probs, compare, divergence, top_words
from strop.algorithms.logprobs import token_log_probs
from strop.algorithms.output_layer import OutputLayer

WAYS = ("own", "sampled", "reverse", "forward", "js", "top 64")
VOCABULARY = 151_936
MIB = 2**20


def loss(
    way: str, states_NH: Tensor, head: OutputLayer, of_teacher_NH: Tensor, teacher: OutputLayer
) -> Tensor:
    """Return the sum of what a way computes of ``states_NH``."""
    ids_N = torch.arange(len(states_NH)) * 37 % VOCABULARY
    if way in ("own", "sampled"):
        own = token_log_probs(states_NH, head, ids_N, temperature=1.0, with_entropy=True)
        if way == "own":
            return own.log_probs_N.sum()
        with torch.no_grad():
            judged = token_log_probs(of_teacher_NH, teacher, ids_N, temperature=1.0)
        return (own.log_probs_N - judged.log_probs_N).sum()
    if way == "top 64":
        with torch.no_grad():
            words, top = top_words(of_teacher_NH, teacher, 64, temperature=1.0)
        return divergence(top, chosen_log_probs(states_NH, head, words, temperature=1.0)[0], "reverse").sum()
    return compare(
        states_NH, head, of_teacher_NH, teacher, kind=way, js_weight=0.5, temperature=1.0
    ).divergence_N.sum()


def measure(way: str, tokens: int, hidden: int) -> dict[str, float]:
    """Measure CPU seconds and MiB in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    states_NH, of_teacher_NH = torch.randn(tokens, hidden, requires_grad=True), torch.randn(tokens, hidden)
    heads = [torch.randn(VOCABULARY, hidden) / hidden**0.5 for _ in range(2)]
    heads[0].requires_grad_()
    for leaf in (states_NH, heads[0]):
        leaf.grad = torch.zeros_like(leaf).fill_(1e-30)  # written: pages are resident
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    loss(way, states_NH, OutputLayer(heads[0]), of_teacher_NH, OutputLayer(heads[1])).backward()
    took = time.process_time() - began
    return {"s": took, "MiB": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / MIB}


def apart(way: str, tokens: int, hidden: int) -> dict[str, float]:
    """Measure in a process of its own."""
    command = [sys.executable, __file__, "--one", way, "--tokens", str(tokens), "--hidden", str(hidden)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 512, 896])
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.tokens, options.hidden[0])))
        return
    lines = [
        f"# A teacher's judgement beside the policy's own log-probs\n\n{description('torch', threads=1)}",
        f"{options.tokens} tokens, {VOCABULARY:,} words, float32; medians of {options.rounds} rounds.\n",
        "| width | way | CPU s | of own | MiB |\n| ---: | --- | ---: | ---: | ---: |",
    ]
    print("\n".join(lines), flush=True)
    for hidden in options.hidden:
        rounds = [{way: apart(way, options.tokens, hidden) for way in WAYS} for _ in range(options.rounds)]
        for way in WAYS:
            seconds = statistics.median(one[way]["s"] for one in rounds)
            ratio = statistics.median(one[way]["s"] / one["own"]["s"] for one in rounds)
            memory = statistics.median(one[way]["MiB"] for one in rounds)
            lines.append(f"| {hidden} | {way} | {seconds:.1f} | {ratio:.2f} | {memory:.0f} |")
            print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
