"""`make distill-demo`: a student learns additions from the judgement of the model of `make demo`.

The student is the first warm-up checkpoint that was kept. Three runs have the same number of samples:

1. distillation: the teacher's reverse KL at each token of the student's own answers; no reward, no answers;
2. GRPO: a reward for each answer;
3. `strop sft` on the right answers, one for each sample of the others.

The table has the share of held-out problems that a sampled answer solves.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import pyarrow.parquet as pq
import torch
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from strop.config.load import load_config
from strop.models.loader import load_causal_lm, load_tokenizer
from strop.session import session
from strop.trainer import commands

from demo import exports, warm_up
from evaluate import evaluate

HERE = Path(__file__).parent
SAMPLES = 512
"""Of an iteration of ``demo.yaml``: 128 prompts with 4 answers."""
SCORE = "val/test_score/strop/arithmetic"
PARTS = 5
"""Of a run, each with an evaluation at its end."""
console = Console()


def train(run: Path, overrides: Sequence[str]) -> list[float]:
    """Train by ``demo.yaml``; return the validation scores, the first of them before training."""
    config = load_config(
        [
            *("trainer.val_before_train=True", "algorithm.adv_estimator=grpo"),
            "actor_rollout_ref.actor.ppo_mini_batch_size=32",  # more updates: these runs are short
            f"trainer.default_local_dir={run}",
            *overrides,
        ],
        config_path=HERE / "demo.yaml",
    )
    with session("train"):
        commands.train(config)
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line[SCORE] for line in lines if SCORE in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--demo", type=Path, default=Path("runs/demo"), help="folder of `make demo`")
    parser.add_argument("--out", type=Path, default=Path("runs/distill"))
    parser.add_argument("--steps", type=int, default=100, help="iterations of 512 samples, in fifths")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    options = parser.parse_args()
    logging.disable_progress_bar()  # transformers draws one even for half a megabyte
    torch.set_num_threads(1)  # a model this small is no faster with more threads
    teachers = sorted(options.demo.glob("*-seed*/final_model"))
    if not teachers:
        parser.error(f"{options.demo} has no *-seed*/final_model; train the teacher first: make demo")
    teacher, data = teachers[0], options.demo / "data"
    problems = pq.read_table(data / "test.parquet").to_pylist()
    start = exports(options.demo / "warm_up")[0]
    console.print(
        f"teacher {teacher}: {evaluate(load_causal_lm(teacher), load_tokenizer(teacher), problems)}"
    )

    found: dict[str, list[tuple[list[float], float]]] = {}
    for seed in options.seeds:
        common = [
            f"actor_rollout_ref.model.path={start}",
            f"data.train_files={data / 'train.parquet'}",
            f"data.val_files={data / 'test.parquet'}",
            f"trainer.seed={seed}",
            f"trainer.total_training_steps={options.steps}",
            f"trainer.test_freq={options.steps // PARTS}",
        ]
        judged = ["reward_model.reward_manager=none", f"teacher.model.path={teacher}"]
        for name, overrides in {"teacher": judged, "GRPO": []}.items():
            began = time.perf_counter()
            scores = train(options.out / f"{name}-seed{seed}", [*common, *overrides])
            found.setdefault(name, []).append((scores, time.perf_counter() - began))
        began = time.perf_counter()
        right = [
            f"data.train_batch_size={SAMPLES}",
            f"trainer.total_training_steps={options.steps}",
            f"trainer.save_freq={options.steps // PARTS}",
        ]
        models = warm_up(start, data, options.out / f"sft-seed{seed}", seed=seed, overrides=right)
        seconds = time.perf_counter() - began
        tokenizer = load_tokenizer(start)
        scores = [evaluate(load_causal_lm(one), tokenizer, problems).sampled for one in (start, *models)]
        found.setdefault("sft", []).append((scores, seconds))

    title = f"held-out accuracy, sampled; means of seeds {', '.join(map(str, options.seeds))}"
    table = Table("samples", title=title, pad_edge=False)  # 80 columns
    for part in range(PARTS + 1):
        table.add_column(f"{part * options.steps // PARTS * SAMPLES / 1000:.0f}k", justify="right")
    for column in ("min", "max", "s"):
        table.add_column(column, justify="right")
    for name, runs in found.items():
        means = [f"{mean(values):.3f}" for values in zip(*(scores for scores, _ in runs), strict=True)]
        last = [scores[-1] for scores, _ in runs]
        seconds = mean(seconds for _, seconds in runs)
        table.add_row(name, *means, f"{min(last):.3f}", f"{max(last):.3f}", f"{seconds:.0f}")
    console.print(table)


if __name__ == "__main__":
    main()
