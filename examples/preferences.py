"""The whole path from comparisons to a better policy, in a few minutes on a CPU.

1. `strop sft`: a tiny model learns from answers of mixed quality;
2. it answers prompts several times, and pairs of its answers are compared, with a few wrong verdicts;
3. `strop train-rm`: a reward model learns from the comparisons;
4. `strop train`: PPO against the reward model, with a KL penalty to the policy of step 1;
5. the truth, which no training saw, judges: how often is an answer better than one from before?

The task and its truth are in preferences_task.py, the judgement in preferences_report.py.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
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
"""Prompts that no training sees: half of what is judged, half of what the reward model is tested on."""
PAIRS = 6000
WRONG = 0.05
"""Share of the training pairs whose verdict is turned round. Held-out pairs tell the truth."""
SFT = ("data.train_batch_size=128", "update.optim.lr=2e-3", "trainer.total_epochs=2")
REWARD_MODEL = ("data.train_batch_size=64", "update.optim.lr=1e-3", "trainer.total_epochs=3")
SMALL = (
    "data.max_prompt_length=8",
    "data.max_response_length=8",
    "update.micro_batch_size_per_gpu=128",
    "trainer.n_gpus_per_node=1",
    "trainer.device=cpu",
    "trainer.test_freq=50",
    "trainer.resume_mode=disable",
)
console = Console()


def strop(*arguments: str) -> None:
    """Run a `strop` command, as a shell would."""
    console.print(
        f"\n$ strop {' '.join(arguments)}", style="bold", markup=False, highlight=False, soft_wrap=True
    )
    if status := cli.main(arguments):
        raise SystemExit(status)


def write(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Rows as a parquet file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def several_answers(model: Path, prompts: Sequence[str], n: int) -> list[list[str]]:
    """``n`` sampled answers of a model to each prompt."""
    policy, tokenizer = load_causal_lm(model), tiny_model.build_tokenizer(task.LETTERS)
    found: list[list[str]] = []
    for start in range(0, len(prompts), 500):
        rows = [task.prompt_row(letters) for letters in prompts[start : start + 500]]
        found += answers(policy, tokenizer, rows, n=n, do_sample=True, max_tokens=task.ANSWER_TOKENS)
    return found


def fine_tune(start: Path, out: Path, prompts: Sequence[str], common: Sequence[str], seed: int) -> Path:
    """From a fresh model to one that answers in the right form, more or less well."""
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


def model_preferences(
    policy: Path, out: Path, prompts: Sequence[str], common: Sequence[str], seed: int
) -> Path:
    """From comparisons of the policy's own answers to a reward model."""
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
    run = out / "reward_model"
    files = f"data.train_files={train}", f"data.val_files={held_out}"
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
    """PPO against the reward model; its validations hold the answers that are judged. Returns the run."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/preferences"))
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of preferences.yaml")
    options = parser.parse_intermixed_args()
    logging.disable_progress_bar()  # of transformers, for files of half a megabyte
    torch.set_num_threads(1)  # so small a model is no faster on more
    started, out, seed = time.perf_counter(), options.out, options.seed

    prompts = task.all_prompts(random.Random(seed))
    tokenizer = tiny_model.build_tokenizer(task.LETTERS)
    tiny_model.build_model(tokenizer, seed=seed).save_pretrained(out / "start")
    tokenizer.save_pretrained(out / "start")
    common = f"data.cache_dir={out / 'cache'}", f"trainer.seed={seed}"
    policy = fine_tune(out / "start", out, prompts, (*SMALL, *common), seed)
    reward_model = model_preferences(policy, out, prompts, (*SMALL, *common), seed)
    run = train(policy, reward_model, out, prompts, common, options.overrides)

    judgements = judge(run)
    picture = draw(judgements, run / "preferences.png")
    show(judgements, out / "reward_model", console)
    console.print(
        f"{time.perf_counter() - started:.0f} s\n"
        f"picture:       {picture}\n"
        f"trained model: {run / 'final_model'}\n"
        "try next:      algorithm.kl_ctrl.kl_coef=0.05 and see the reward model deceived: its score goes on "
        "rising, while the truth falls"
    )


if __name__ == "__main__":
    main()
