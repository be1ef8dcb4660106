"""RLHF from comparisons, end to end, in a few minutes on a CPU.

1. `strop sft` trains a tiny model on answers of mixed quality;
2. the model samples several answers per prompt, and pairs of them are labelled, a few of them wrongly;
3. `strop dpo` trains the policy of step 1 on the pairs directly;
4. `strop train-rm` trains a reward model on the pairs;
5. `strop train` runs PPO against the reward model, with a KL penalty to the policy of step 1;
6. the ground truth, which no training stage uses, measures the win rates against the policy of step 1.

The task and its ground truth are in preferences_task.py, the evaluation in preferences_report.py.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from rich.console import Console
from transformers.utils import logging

from strop.cli import main as cli
from strop.models.loader import load_causal_lm

import preferences_task as task
import tiny_model
from evaluate import answers
from preferences_report import draw, judge, show

HERE = Path(__file__).parent
HELD_OUT = 500
"""Prompts excluded from training; the policy and the reward model are both evaluated on them."""
PAIRS = 6000
WRONG = 0.05
"""Fraction of training pairs with a flipped label. Held-out pairs are labelled correctly."""
SFT = ("data.train_batch_size=128", "update.optim.lr=2e-3", "trainer.total_epochs=2")
DPO = ("data.train_batch_size=64", "update.optim.lr=5e-4", "update.nll_coef=1.0", "trainer.total_epochs=2")
REWARD_MODEL = ("data.train_batch_size=64", "update.optim.lr=1e-3", "trainer.total_epochs=3")
SMALL = (
    "data.max_prompt_length=8",
    "data.max_response_length=8",
    "data.filter_overlong=True",  # sampled answers that were cut have 8 tokens, and none for their end
    "update.micro_batch_size_per_gpu=128",
    "trainer.n_gpus_per_node=1",
    "trainer.device=cpu",
    "trainer.test_freq=50",
    "trainer.resume_mode=disable",
)
console = Console()


def strop(*arguments: str) -> None:
    """Run a `strop` command in this process; exit if it fails."""
    console.print(
        f"\n$ strop {' '.join(arguments)}", style="bold", markup=False, highlight=False, soft_wrap=True
    )
    if status := cli.main(arguments):
        raise SystemExit(status)


def write(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write rows to a parquet file; return ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def several_answers(model: Path, prompts: Sequence[str], n: int) -> list[list[str]]:
    """Sample ``n`` answers to each prompt."""
    policy, tokenizer = load_causal_lm(model), tiny_model.build_tokenizer(task.LETTERS)
    found: list[list[str]] = []
    for start in range(0, len(prompts), 500):
        rows = [task.prompt_row(letters) for letters in prompts[start : start + 500]]
        found += answers(policy, tokenizer, rows, n=n, do_sample=True, max_tokens=task.ANSWER_TOKENS)
    return found


def fine_tune(start: Path, out: Path, prompts: Sequence[str], common: Sequence[str], seed: int) -> Path:
    """Fine-tune the random model on answers of mixed quality; return the trained model's folder."""
    generator = random.Random(seed)
    rows = [
        task.prompt_row(letters) | {"response": task.demonstrate(letters, generator)} for letters in prompts
    ]
    train = write(out / "data" / "sft.parquet", rows[HELD_OUT:])
    held_out = write(out / "data" / "sft_held_out.parquet", rows[:HELD_OUT])
    run = out / "sft"
    files = f"data.train_files={train}", f"data.val_files={held_out}"
    strop("sft", f"model.path={start}", *files, *common, *SFT, f"trainer.default_local_dir={run}")
    return run / "final_model"


def label_pairs(policy: Path, out: Path, prompts: Sequence[str], seed: int) -> tuple[str, str]:
    """Label pairs of the policy's samples; return the overrides that name the files."""
    generator = random.Random(seed)
    prompts = prompts[: HELD_OUT + PAIRS]
    groups = several_answers(policy, prompts, 3)
    held_out, train = (
        write(out / "data" / name, task.compare(*part, wrong=wrong, generator=generator))
        for name, part, wrong in (
            ("pairs_held_out.parquet", (prompts[:HELD_OUT], groups[:HELD_OUT]), 0.0),
            ("pairs.parquet", (prompts[HELD_OUT:], groups[HELD_OUT:]), WRONG),
        )
    )
    return f"data.train_files={train}", f"data.val_files={held_out}"


def prefer(policy: Path, files: Sequence[str], out: Path, common: Sequence[str]) -> Path:
    """Train the policy on the pairs by DPO; return the trained model's folder."""
    run = out / "dpo"
    strop("dpo", f"model.path={policy}", *files, *common, *DPO, f"trainer.default_local_dir={run}")
    return run / "final_model"


def model_preferences(policy: Path, files: Sequence[str], out: Path, common: Sequence[str]) -> Path:
    """Train a reward model on the pairs; return its folder."""
    run = out / "reward_model"
    strop(
        "train-rm", f"model.path={policy}", *files, *common, *REWARD_MODEL, f"trainer.default_local_dir={run}"
    )
    return run / "final_model"


def train(
    policy: Path,
    reward_model: Path,
    out: Path,
    prompts: Sequence[str],
    common: Sequence[str],
    overrides: Sequence[str],
) -> Path:
    """Run PPO against the reward model; return the run folder, whose validation samples are evaluated."""
    rows = [task.prompt_row(letters) | {"reward_model": {"style": "model"}} for letters in prompts]
    files = (
        f"data.train_files={write(out / 'data' / 'rl.parquet', rows[HELD_OUT:])}",
        f"data.val_files={write(out / 'data' / 'rl_held_out.parquet', rows[:HELD_OUT])}",
    )
    run = out / "ppo"
    strop(
        "train",
        "--config-path",
        str(HERE / "preferences.yaml"),
        f"actor_rollout_ref.model.path={policy}",
        f"reward_model.model.path={reward_model}",
        f"critic.model.path={reward_model}",
        *files,
        *common,
        f"trainer.default_local_dir={run}",
        *overrides,
    )
    return run


def win_rate(model: Path, before: Path, prompts: Sequence[str]) -> float:
    """Return the true win rate of a model's answers to held-out prompts against those of ``before``."""
    pairs = zip(prompts, several_answers(model, prompts, 2), several_answers(before, prompts, 2), strict=True)
    return fmean(
        task.preference(letters, answer, other)
        for letters, group, others in pairs
        for answer, other in product(group, others)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/preferences"))
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of preferences.yaml")
    options = parser.parse_intermixed_args()
    logging.disable_progress_bar()  # transformers draws one even for half a megabyte
    torch.set_num_threads(1)  # a model this small is no faster with more threads
    started, out, seed = time.perf_counter(), options.out, options.seed

    prompts = task.all_prompts(random.Random(seed))
    tokenizer = tiny_model.build_tokenizer(task.LETTERS)
    tiny_model.build_model(tokenizer, seed=seed).save_pretrained(out / "start")
    tokenizer.save_pretrained(out / "start")
    common = f"data.cache_dir={out / 'cache'}", f"trainer.seed={seed}"
    policy = fine_tune(out / "start", out, prompts, (*SMALL, *common), seed)
    pairs = label_pairs(policy, out, prompts, seed)
    preferred = prefer(policy, pairs, out, (*SMALL, *common))
    reward_model = model_preferences(policy, pairs, out, (*SMALL, *common))
    run = train(policy, reward_model, out, prompts, common, options.overrides)

    judgements = judge(run)
    picture = draw(judgements, run / "preferences.png")
    show(judgements, out / "reward_model", console)
    rate = win_rate(preferred, policy, prompts[:HELD_OUT])
    console.print(f"true win rate of DPO against the initial policy: {rate:.3f}")
    console.print(
        f"{time.perf_counter() - started:.0f} s\n"
        f"picture:       {picture}\n"
        f"trained model: {run / 'final_model'}\n"
        "try next:      algorithm.kl_ctrl.kl_coef=0.05 to see reward hacking: the reward model's score keeps "
        "rising while the true win rate falls"
    )


if __name__ == "__main__":
    main()
