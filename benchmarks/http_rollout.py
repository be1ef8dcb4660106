"""Compare generation over HTTP with vLLM in the process and with the hf rollout.

    python benchmarks/http_rollout.py [--threads 1] [--rounds 3] [--servers 1] [--at-once 64 256] [--model 5M]

Tokens per second of samples of up to 128 tokens, alternating in one run, medians without the first round; and
CPU seconds per 1,000 tokens of this process, as a trainer's, and of the servers. The last column is seconds
of this process for a transfer of the weights.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from strop.config.load import load_config
from strop.process_tree import descendants
from strop.rollout.hf.engine import HFRollout
from strop.rollout.http.engine import HTTPRollout
from strop.rollout.http.pool import Pool
from strop.rollout.http.start import OwnServer, command
from strop.rollout.http.wire import ARGUMENTS
from strop.rollout.vllm.arguments import FIXED, whole_prompts
from strop.rollout.vllm.checkpoint import CheckpointWeights
from strop.rollout.vllm.engine import VLLMRollout

from rollout_hf import MODELS, build, prompts_of, run_ours

SAMPLES, PROMPT_TOKENS, TOKENS = 8, 64, 128


def arguments_of(folder: Path, at_once: int) -> dict[str, Any]:
    return {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "load_format": "dummy",
        "max_model_len": PROMPT_TOKENS + TOKENS,
        "max_num_seqs": at_once,
        "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": 2 << 30,
        "enforce_eager": True,
    }


def over_http(model: Any, folder: Path, at_once: int, servers: int) -> HTTPRollout:
    arguments = arguments_of(folder, at_once)
    line = command({**arguments, **whole_prompts(arguments), **FIXED, **ARGUMENTS}, [])
    own = [OwnServer(line, "secret", folder / f"{number}.log") for number in range(servers)]
    settings = load_config([]).actor_rollout_ref.rollout.http
    pool = Pool(settings, {"max_model_len": PROMPT_TOKENS + TOKENS}, model.config.vocab_size, "secret", own)
    return HTTPRollout(
        CheckpointWeights(model),
        pool,
        dtype=torch.float32,
        slots=at_once,
        pad_token_id=0,
        eos_token_ids=[1],
    )


def in_process(model: Any, folder: Path, at_once: int) -> VLLMRollout:
    return VLLMRollout(
        model,
        arguments_of(folder, at_once),
        device=torch.device("cpu"),
        pad_token_id=0,
        eos_token_ids=[1],
    )


def cpu_of_servers() -> float:
    """Return the CPU seconds of the processes below this one."""
    ticks = 0
    for process in descendants(os.getpid()):
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(runners: dict[str, Callable[[], int]], rounds: int) -> dict[str, list[float]]:
    """Return tokens per second, and CPU seconds per 1,000 tokens of this process and of the servers."""
    found: dict[str, list[list[float]]] = {name: [] for name in runners}
    for number in range(rounds + 1):
        for name, runner in runners.items():
            begun, own, servers = time.perf_counter(), time.process_time(), cpu_of_servers()
            tokens = runner()
            taken = time.perf_counter() - begun
            cpu = [time.process_time() - own, cpu_of_servers() - servers]
            if number:
                found[name].append([tokens / taken, *(1000 * seconds / tokens for seconds in cpu)])
    return {
        name: [statistics.median(column) for column in zip(*rows, strict=True)]
        for name, rows in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--at-once", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--model", default="5M", choices=MODELS)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # of the servers
    torch.set_num_threads(options.threads)
    model = build(options.model)
    largest = max(options.at_once)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        http = over_http(model, Path(folder), largest, options.servers)
        vllm = in_process(model, Path(folder), largest)
        hf: Any = HFRollout(model, pad_token_id=0, eos_token_ids=[1])
        print(
            f"{options.model}, threads {options.threads}, servers {options.servers}, rounds {options.rounds}"
        )
        print(
            f"{'rollout':8} {'at once':>8} {'tokens/s':>9} {'CPU s/1,000':>12} {'servers':>9} {'transfer':>9}"
        )
        transfers = {"hf": 0.0}
        for name, rollout in (("http", http), ("vllm", vllm)):
            for _ in range(2):
                begun = time.process_time()
                rollout.update_weights(model.named_parameters())
                transfers[name] = time.process_time() - begun
        stops = list(range(2, 2 + model.config.vocab_size // 128))
        for at_once in options.at_once:
            prompts = prompts_of(at_once // SAMPLES, PROMPT_TOKENS, SAMPLES, model.config.vocab_size)
            runners = {
                name: partial(run_ours, rollout, prompts, TOKENS, SAMPLES, stops)
                for name, rollout in (("http", http), ("vllm", vllm), ("hf", hf))
            }
            for name, (rate, own, servers) in measure(runners, options.rounds).items():
                print(
                    f"{name:8} {at_once:8} {rate:9.0f} {own:12.3f} {servers:9.3f} {transfers[name]:8.3f}s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
