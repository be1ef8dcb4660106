"""Compare the generation throughput of the hf rollout with that of transformers' `generate`.

    python benchmarks/rollout_hf.py [--threads 1] [--rounds 3] [--bfloat16] [--models 5M 30M]

Prints useful tokens per second (up to and including the stop token) of both, alternating in one run, and the
ratio of the best rounds; on a shared machine only the ratio is meaningful. Models are random Qwen2s. For
uneven lengths 1/32 of the vocabulary are stop tokens: responses have 32 tokens on average and at most 128.
The last line is the size of the demo: a tiny model, with milliseconds per call.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from strop.protocol import DataProto
from strop.rollout.base import SamplingParams
from strop.rollout.hf.engine import HFRollout

MODELS = {
    "140k": {
        "vocab_size": 48,
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "heads": (4, 2),
    },
    "5M": {
        "vocab_size": 4096,
        "hidden_size": 192,
        "intermediate_size": 640,
        "num_hidden_layers": 8,
        "heads": (6, 2),
    },
    "30M": {
        "vocab_size": 16384,
        "hidden_size": 448,
        "intermediate_size": 1280,
        "num_hidden_layers": 10,
        "heads": (7, 1),
    },
    "135M": {  # sizes of SmolLM2-135M
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "heads": (9, 3),
    },
}


def build(name: str) -> PreTrainedModel:
    sizes = dict(MODELS[name])
    heads, groups = sizes.pop("heads")
    torch.manual_seed(0)
    config = Qwen2Config(
        **sizes,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config).eval()


def prompts_of(count: int, width: int, n: int, vocabulary: int) -> DataProto:
    """Return left-padded prompts of half to all of ``width`` tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(width // 2, width + 1, (count, 1), generator=generator)
    mask = (torch.arange(width) >= width - lengths).long()
    ids = torch.randint(vocabulary // 2, vocabulary, mask.shape, generator=generator) * mask
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    seeds = torch.arange(count * n).view(count, n)
    return DataProto.from_dict(
        {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "seeds": seeds}
    )


def run_transformers(
    model: PreTrainedModel,
    prompts: DataProto,
    tokens: int,
    n: int,
    stops: list[int],
    autocast: torch.dtype | None,
) -> int:
    width = prompts.batch["input_ids"].shape[1]
    context = contextlib.nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast)
    with torch.no_grad(), context:
        ids = model.generate(
            input_ids=prompts.batch["input_ids"],
            attention_mask=prompts.batch["attention_mask"],
            do_sample=True,
            top_k=0,
            top_p=1.0,
            num_return_sequences=n,
            max_new_tokens=tokens,
            min_new_tokens=None if stops else tokens,
            eos_token_id=stops or None,
            pad_token_id=0,
        )[:, width:]
    stopped = (ids[..., None] == torch.tensor(stops, dtype=torch.long)).any(-1)
    lengths = torch.where(stopped.any(1), stopped.int().argmax(1) + 1, ids.shape[1])
    return int(lengths.sum())


def run_ours(rollout: HFRollout, prompts: DataProto, tokens: int, n: int, stops: list[int]) -> int:
    params = SamplingParams(max_tokens=tokens, n=n, stop_token_ids=tuple(stops), ignore_eos=True)
    return int(rollout.generate(prompts, params).batch["response_mask"].sum())


def race(rounds: int, *runners: Callable[[], int]) -> list[tuple[float, float]]:
    """Alternate between runners; return each one's best tokens per second and that call's seconds."""
    best = [(0.0, 0.0)] * len(runners)
    for _ in range(rounds):
        for index, runner in enumerate(runners):
            started = time.perf_counter()
            tokens = runner()
            seconds = time.perf_counter() - started
            best[index] = max(best[index], (tokens / seconds, seconds))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bfloat16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--models", nargs="*", default=["5M", "30M"], choices=MODELS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    autocast = torch.bfloat16 if options.bfloat16 else None

    precision = "bfloat16 autocast" if autocast else "float32"
    print(f"threads {options.threads}, {precision}, best of {options.rounds} rounds, useful tokens/s")
    print(f"{'model':6} {'responses':>9} {'lengths':>8} {'transformers':>12} {'strop':>8} {'ratio':>6}")
    cases = [(name, kind, 16, 4, 128) for name in options.models for kind in ("uneven", "limit")]
    for name, kind, count, n, tokens in [*cases, ("140k", "limit", 64, 8, 4)]:
        model = build(name)
        vocabulary = model.config.vocab_size
        prompts = prompts_of(count, 12 if name == "140k" else 64, n, vocabulary)
        stops = list(range(2, 2 + vocabulary // 32)) if kind == "uneven" else []
        rollout = HFRollout(model, pad_token_id=0, eos_token_ids=[1], compute_dtype=autocast)
        theirs, ours = race(
            options.rounds if name != "140k" else 20 * options.rounds,
            lambda *a, m=model, p=prompts, t=tokens, n=n, s=stops: run_transformers(m, p, t, n, s, autocast),
            lambda *a, r=rollout, p=prompts, t=tokens, n=n, s=stops: run_ours(r, p, t, n, s),
        )
        print(
            f"{name:6} {count * n:9} {kind:>8} {theirs[0]:12.0f} {ours[0]:8.0f} {ours[0] / theirs[0]:6.1f}"
            + (f"   {theirs[1] * 1e3:.1f} ms and {ours[1] * 1e3:.1f} ms per call" if name == "140k" else ""),
            flush=True,
        )


if __name__ == "__main__":
    main()
