"""Compare the generation throughput of strop's vLLM rollout with vLLM alone and with the hf rollout.

    python benchmarks/rollout_vllm.py [--threads 2] [--rounds 5] [--models 5M 30M] [--bfloat16]

Useful tokens per second with the same prompts, stop tokens and length limit, alternating in one run.
    vLLM alone: `LLM.generate` on the strop engine, n samples per prompt, without seeds and log-probs;
    strop vllm: the rollout as in training, with a seed per sample, log-probs of all sampled tokens, and the
        conversion to a batch of columns;
    strop hf: strop's other rollout, on the trainer's weights.
Also seconds per transfer of the weights to the engine, and per comparison of the engine's weights with the
trainer's. Lengths as in rollout_hf.py.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from strop.models.checkpoint_layout import CheckpointLayout
from strop.rollout.hf.engine import HFRollout
from strop.rollout.vllm.engine import VLLMRollout
from strop.rollout.weights import checksums, require_equal_checksums

from rollout_hf import MODELS, build, prompts_of, run_ours

PROMPTS, SAMPLES, PROMPT_TOKENS, TOKENS = 8, 8, 64, 128


def engine_of(model: Any, folder: Path, dtype: torch.dtype) -> VLLMRollout:
    model.save_pretrained(folder)
    arguments = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "load_format": "dummy",
        "max_model_len": PROMPT_TOKENS + TOKENS,
        "max_num_seqs": PROMPTS * SAMPLES,
        "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": 2 << 30,
        "enforce_eager": True,
    }
    rollout = VLLMRollout(model, arguments, device=torch.device("cpu"), pad_token_id=0, eos_token_ids=[1])
    rollout.update_weights(model.named_parameters())
    return rollout


def run_vllm_alone(rollout: VLLMRollout, prompts: Any, tokens: int, n: int, stops: list[int]) -> int:
    from vllm import SamplingParams

    params = SamplingParams(
        n=n, temperature=1.0, max_tokens=tokens, stop_token_ids=stops, ignore_eos=True, detokenize=False
    )
    ids = [
        {"prompt_token_ids": row[mask.bool()].tolist()}
        for row, mask in zip(prompts.batch["input_ids"], prompts.batch["attention_mask"], strict=True)
    ]
    outputs = rollout._llm.generate(ids, params, use_tqdm=False)
    return sum(len(sample.token_ids) for request in outputs for sample in request.outputs)


def rates(rounds: int, runners: dict[str, Callable[[], int]]) -> dict[str, float]:
    """Alternate between runners; return each one's median tokens per second without the first round."""
    found: dict[str, list[float]] = {name: [] for name in runners}
    for number in range(rounds + 1):
        for name, runner in runners.items():
            started = time.perf_counter()
            tokens = runner()
            if number:
                found[name].append(tokens / (time.perf_counter() - started))
    return {name: statistics.median(values) for name, values in found.items()}


def transfer_seconds(
    rollout: VLLMRollout, model: Any, rounds: int, dtype: torch.dtype
) -> tuple[float, float]:
    """Return the median seconds of a transfer, and of a check."""
    transfers, checks = [], []
    for _ in range(rounds):
        started = time.perf_counter()
        rollout.update_weights(model.named_parameters())
        sent = time.perf_counter()
        weights = CheckpointLayout(model).convert(model.named_parameters())
        require_equal_checksums(checksums(weights, dtype), rollout.checksums(), 0)
        transfers.append(sent - started)
        checks.append(time.perf_counter() - sent)
    return statistics.median(transfers), statistics.median(checks)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--models", nargs="*", default=["5M", "30M"], choices=MODELS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = torch.bfloat16 if options.bfloat16 else torch.float32
    print(f"threads {options.threads}, {dtype}, medians of {options.rounds} rounds, useful tokens per second")
    print(
        f"{'model':6} {'lengths':>8} {'vLLM alone':>11} {'strop vllm':>11} {'ratio':>6} {'strop hf':>9} "
        f"{'transfer':>9} {'check':>7}"
    )
    for name in options.models:
        measure(name, options.rounds, dtype)


def measure(name: str, rounds: int, dtype: torch.dtype) -> None:
    """Print the rows of one model; its engine is freed on return."""
    model = build(name)
    vocabulary = model.config.vocab_size
    prompts = prompts_of(PROMPTS, PROMPT_TOKENS, SAMPLES, vocabulary)
    with tempfile.TemporaryDirectory() as folder:
        rollout = engine_of(model, Path(folder), dtype)
    autocast = None if dtype is torch.float32 else dtype
    hf: Any = HFRollout(model, pad_token_id=0, eos_token_ids=[1], compute_dtype=autocast)
    sync, check = transfer_seconds(rollout, model, rounds, dtype)
    for kind, stops in (("uneven", list(range(2, 2 + vocabulary // 32))), ("limit", [])):
        runners = {
            "alone": lambda s=stops: run_vllm_alone(rollout, prompts, TOKENS, SAMPLES, s),
            "vllm": lambda s=stops: run_ours(rollout, prompts, TOKENS, SAMPLES, s),
            "hf": lambda s=stops: run_ours(hf, prompts, TOKENS, SAMPLES, s),
        }
        found = rates(rounds, runners)
        print(
            f"{name:6} {kind:>8} {found['alone']:11.0f} {found['vllm']:11.0f} "
            f"{found['vllm'] / found['alone']:6.2f} {found['hf']:9.0f} {sync:8.3f}s {check:6.3f}s",
            flush=True,
        )


if __name__ == "__main__":
    main()
