"""`make demo`: a tiny model learns to add, in a few minutes on a CPU.

1. write the additions up to 99 + 99 as a data set and hold out 500 of them;
2. build a small Qwen2 with a character tokenizer and fine-tune it on the answer format with `strop sft`
   (examples/warm_up.yaml);
3. train it with PPO with `strop train` (examples/demo.yaml);
4. compare its accuracy on the held-out problems before and after PPO.

`strop sft` and `strop train` are the commands that train large models.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from strop.config.load import load_config, load_tree
from strop.config.trees import SFT
from strop.models.loader import load_causal_lm, load_tokenizer
from strop.prepare import prepare
from strop.session import session
from strop.trainer import commands

import tiny_model
from evaluate import Accuracy, evaluate, sample_answers

HERE = Path(__file__).parent
HALF_RIGHT = 0.5
ALGORITHMS = {  # value of algorithm.adv_estimator; only gae trains a critic
    "ppo": "gae",
    "grpo": "grpo",
    "reinforce++": "reinforce_plus_plus",
    "rloo": "rloo",
    "remax": "remax",
}
console = Console()


def asynchronous(steps: int) -> list[str]:
    """Return the overrides with which generation runs up to ``steps`` iterations ahead, in a thread."""
    if steps == 0:
        return []
    return [
        f"trainer.async_steps={steps}",
        "trainer.worker_group=local",
        "trainer.resource_pools={learner: [1], rollout: [1]}",
        "trainer.placement={Rollout: rollout}",  # other roles are in the first pool
        "actor_rollout_ref.hybrid_engine=False",
        "actor_rollout_ref.actor.rollout_is=token",  # samples are of an earlier policy
        # 1e-3 diverges with some seeds when samples are more than one iteration old (docs/asynchronous.md).
        *(["actor_rollout_ref.actor.optim.lr=3e-4"] if steps > 1 else []),
    ]


def make_task(out: Path, seed: int) -> int:
    """Write the train, test and warm-up parquet files; return the number of training rows."""
    prepare("arithmetic", None, out, max_operand=99, held_out=500, seed=seed)
    rows = pq.read_table(out / "train.parquet").to_pylist()
    answers = [{"prompt": row["prompt"], "response": row["reward_model"]["ground_truth"]} for row in rows]
    pq.write_table(pa.Table.from_pylist(answers), out / "answers.parquet")
    return len(rows)


def exports(run: Path) -> list[Path]:
    """Return the exported models of a run's checkpoints, oldest first."""
    steps = sorted(run.glob("global_step_*"), key=lambda folder: int(folder.name.rpartition("_")[2]))
    return [step / "actor" / "huggingface" for step in steps]


def warm_up(model: Path, data: Path, run: Path, *, seed: int, overrides: Sequence[str] = ()) -> list[Path]:
    """Run `strop sft --config-path examples/warm_up.yaml ...`; return its exported models, oldest first."""
    config = load_tree(
        SFT,
        [
            f"model.path={model}",
            f"data.train_files={data / 'answers.parquet'}",
            f"data.cache_dir={run.parent / 'cache'}",
            f"trainer.default_local_dir={run}",
            f"trainer.seed={seed}",
            *overrides,
        ],
        config_path=HERE / "warm_up.yaml",
    )
    with session("sft"):
        commands.train(config)
    return exports(run)


def first_right(models: list[Path], problems: list[dict]) -> tuple[Path, Accuracy]:
    """Return the first model accurate enough for rewards to differ between samples, else the last one."""
    for model in models:
        found = evaluate(load_causal_lm(model), load_tokenizer(model), problems)
        if found.sampled >= HALF_RIGHT:
            break
    return model, found


def train(model: Path, data: Path, run: Path, *, seed: int, algorithm: str, overrides: list[str]) -> None:
    """Run `strop train --config-path examples/demo.yaml ...`."""
    config = load_config(
        [
            f"actor_rollout_ref.model.path={model}",
            f"data.train_files={data / 'train.parquet'}",
            f"data.val_files={data / 'test.parquet'}",
            f"data.cache_dir={run.parent / 'cache'}",
            f"trainer.default_local_dir={run}",
            f"trainer.seed={seed}",
            f"algorithm.adv_estimator={ALGORITHMS[algorithm]}",
            *overrides,
        ],
        config_path=HERE / "demo.yaml",
    )
    with session("train"):
        commands.train(config)


def show(before: Accuracy, after: Accuracy, answers: list[tuple[str, str, str]]) -> None:
    """Print two tables: accuracy before and after training, and sampled answers."""
    table = Table(title="held-out problems answered correctly")
    for column in ("", "before", "after", "change"):
        table.add_column(column, justify="right")
    for name in ("sampled", "greedy"):
        was, now = getattr(before, name), getattr(after, name)
        table.add_row(name, f"{was:.3f}", f"{now:.3f}", f"{now - was:+.3f}")
    console.print(table)
    table = Table(title="sampled answers")
    for column in ("problem", "answer", "truth"):
        table.add_column(column, justify="right")
    for problem, answer, truth in answers:
        table.add_row(problem, f"[{'green' if answer == truth else 'red'}]{answer}", truth)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="ppo")
    parser.add_argument(
        "--async-steps", type=int, default=0, metavar="N",
        help="generate up to N iterations ahead of training (0)",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of examples/demo.yaml")
    options = parser.parse_intermixed_args()
    logging.disable_progress_bar()  # transformers draws one even for half a megabyte
    torch.set_num_threads(1)  # a model this small is no faster with more threads
    out, started = options.out, time.perf_counter()
    data, start, warm_up_run = out / "data", out / "start", out / "warm_up"
    ahead = f"-async{options.async_steps}" if options.async_steps else ""
    run = out / f"{options.algorithm}{ahead}-seed{options.seed}"

    n_pairs = make_task(data, options.seed)
    tokenizer = tiny_model.build_tokenizer()
    model = tiny_model.build_model(tokenizer, seed=options.seed)
    size = sum(weight.numel() for weight in model.parameters())
    console.print(f"{n_pairs} training problems, {size:,} model parameters")
    model.save_pretrained(start)
    tokenizer.save_pretrained(start)
    problems = pq.read_table(data / "test.parquet").to_pylist()
    models = warm_up(start, data, warm_up_run, seed=options.seed)
    warmed_up, before = first_right(models, problems)
    console.print(f"training starts from warm-up checkpoint {warmed_up.parents[1].name}: {before}")

    overrides = [*asynchronous(options.async_steps), *options.overrides]
    train(warmed_up, data, run, seed=options.seed, algorithm=options.algorithm, overrides=overrides)

    trained = load_causal_lm(run / "final_model")
    after = evaluate(trained, tokenizer, problems)
    show(before, after, sample_answers(trained, tokenizer, problems[:10]))
    console.print(
        f"{time.perf_counter() - started:.0f} s for warm-up, training and evaluation on "
        f"{torch.get_num_threads()} thread(s)\n"
        f"curves:          {run / 'curves.png'}\n"
        f"trained model:   {run / 'final_model'}\n"
        f"inspect samples: .venv/bin/strop view {run}\n"
        f"try next:        make demo ALGORITHM=grpo   (or rloo, remax, reinforce++; SEED=2; ASYNC=1)"
    )


if __name__ == "__main__":
    main()
