"""Measure the cost of the driver by number of workers, with and without handles.

    python benchmarks/driver.py [--workers 1 8 64] [--prompts 1024] [--tokens 512] [--steps 5] [--out FOLDER]

The real trainer runs its real PPO step (generate, score, reference and old log-probs, values, advantages,
4 + 4 mini-batches) on Ray processes whose workers compute almost nothing. Two trainers, with and without
handles, alternate on the same processes. Figures per step: seconds, CPU seconds of the driver's process,
megabytes of tensors through the driver, and CPU seconds by part of the step. ``--out`` saves the tables, the
profile and the plot.

All processes share this machine's cores, so wall-clock seconds with many workers measure contention; the
driver's CPU time and traffic carry over to a cluster.
"""

from __future__ import annotations

import argparse
import cProfile
import datetime
import gc
import os
import pstats
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor

from strop.config.load import load_config
from strop.controller.pools import ResourcePoolManager, Role
from strop.controller.ray.group import RayWorkerGroup
from strop.protocol import DataProto
from strop.trainer.ray_trainer import RayPPOTrainer

from light_workers import LightCritic, LightPolicy

ROLES = {Role.ActorRollout: LightPolicy, Role.RefPolicy: LightPolicy, Role.Critic: LightCritic}
PARTS = ("__next__", "collect", "_start_evaluation", "scored", "_finish_evaluation")
PARTS += ("estimate_advantages", "batch_metrics", "start_critic_update", "start_actor_update", "get")
MB = 1e6


@dataclass(frozen=True)
class Cost:
    """Cost of one step."""

    seconds: float
    cpu_s: float
    """CPU seconds of all threads of the driver's process."""
    main_thread_s: float
    """CPU seconds of the thread that runs the trainer; the other threads are Ray's."""
    sent: int
    received: int


@dataclass(frozen=True)
class Row:
    """Median costs for one number of workers, with or without handles."""

    workers: int
    handles: bool
    cost: Cost
    steps: int
    parts: dict[str, float]
    """CPU seconds of the main thread by part of the step, under the profiler."""
    hottest: list[str]
    """Formatted profile lines of the most expensive functions."""


class Prompts:
    """Prompts of half to all of ``width`` tokens, with the fields of a real data set."""

    def __init__(self, count: int, width: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.lengths = torch.randint(width // 2, width + 1, (count,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {
            "input_ids": torch.arange(1, self.lengths[row] + 1),
            "data_source": "openai/gsm8k",
            "reward_model": {"style": "rule", "ground_truth": str(row)},
            "extra_info": {"split": "train", "index": row},
            "index": row,
        }

    def data_sources(self) -> set[str]:
        return {"openai/gsm8k"}


class Tokenizer:
    """Tokenizer with the one attribute that the trainer reads."""

    pad_token_id = 0


def reward(batch: DataProto) -> Tensor:
    """Return scores [B, T]: 1 on the last token of a response of even length, 0 elsewhere."""
    mask_BT = batch.batch["response_mask"]
    lengths_B = mask_BT.sum(dim=1).long()
    scores_BT = torch.zeros_like(mask_BT)
    scores_BT[torch.arange(len(scores_BT)), lengths_B - 1] = (lengths_B % 2 == 0).float()
    return scores_BT


def build(
    folder: Path, pools: ResourcePoolManager, *, workers: int, prompts: int, tokens: int, handles: bool
) -> RayPPOTrainer:
    """Build a trainer with light workers; the preflight checks require files that are never read."""
    for name in ("train.parquet", "val.parquet"):
        (folder / name).touch()
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    config = load_config(
        [
            f"data.train_files={folder / 'train.parquet'}",
            f"data.val_files={folder / 'val.parquet'}",
            f"data.train_batch_size={prompts}",
            f"data.max_prompt_length={tokens}",
            f"data.max_response_length={tokens}",
            f"actor_rollout_ref.model.path={folder}",
            "actor_rollout_ref.rollout.name=hf",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts // 4}",
            f"trainer.n_gpus_per_node={workers}",
            "trainer.worker_group=ray",
            "trainer.device=cpu",
            f"trainer.handles={handles}",
            "trainer.logger=[console]",
            "trainer.total_training_steps=1000",
            "trainer.default_hdfs_dir=null",
            f"trainer.default_local_dir={folder / 'run'}",
        ]
    )
    data = Prompts(prompts, tokens)
    trainer = RayPPOTrainer(
        config=config,
        tokenizer=Tokenizer(),
        role_worker_mapping=ROLES,
        resource_pool_manager=pools,
        ray_worker_group_cls=RayWorkerGroup,
        reward_fn=reward,
        train_dataset=data,
        val_dataset=data,
    )
    trainer.init_workers()
    return trainer


def take_step(trainer: RayPPOTrainer, batches: Any) -> DataProto:
    """Run one iteration like the training loop."""
    batch, _ = trainer.step(next(batches))
    trainer.global_step += 1
    return batch


def cost_of_step(trainer: RayPPOTrainer, batches: Any) -> Cost:
    """Measure one iteration, including the release of its batch."""
    groups = trainer.groups.values()
    before = [(group.traffic.sent, group.traffic.received) for group in groups]
    gc.collect()
    started = time.perf_counter(), time.process_time(), time.thread_time()
    take_step(trainer, batches)
    ended = time.perf_counter(), time.process_time(), time.thread_time()
    after = [(group.traffic.sent, group.traffic.received) for group in groups]
    times = [end - start for start, end in zip(started, ended, strict=True)]
    sent, received = (sum(now[i] - old[i] for old, now in zip(before, after, strict=True)) for i in (0, 1))
    return Cost(*times, sent, received)


def profile(trainer: RayPPOTrainer, batches: Any, lines: int = 8) -> tuple[dict[str, float], list[str]]:
    """Return CPU seconds of the main thread by part of a step, and the functions with the most own time."""
    profiler = cProfile.Profile(time.thread_time)
    profiler.runcall(take_step, trainer, batches)
    calls = pstats.Stats(profiler).get_stats_profile().func_profiles
    raw = pstats.Stats(profiler).stats  # ty: ignore[unresolved-attribute]
    parts = dict.fromkeys(PARTS, 0.0)
    for (file, _, name), (_, _, _, cumulative, _) in raw.items():
        if name in PARTS and Path(file).name in ("ppo.py", "updates.py", "scores.py"):
            parts[name] += cumulative
    parts["__next__"] = calls["__iter__"].cumtime if "__iter__" in calls else 0.0
    hottest = sorted(raw.items(), key=lambda item: -item[1][2])[:lines]
    return parts, [
        f"{own:6.3f} s {calls:7} calls  {place_of(*where)}" for where, (calls, _, own, _, _) in hottest
    ]


def place_of(file: str, line: int, name: str) -> str:
    """Format a profiled function's location with the last folder only."""
    if file.startswith("~"):
        return re.sub(" at 0x[0-9a-f]+", "", name)
    return f"{'/'.join(Path(file).parts[-2:])}:{line} {name}"


def measure(workers: int, *, prompts: int, tokens: int, steps: int) -> tuple[list[Row], int]:
    """Measure ``workers`` processes with and without handles; also return the bytes of a finished batch."""
    with tempfile.TemporaryDirectory() as folder:
        pools = ResourcePoolManager({"pool": [workers]}, dict.fromkeys(ROLES, "pool"))
        sizes = {"workers": workers, "prompts": prompts, "tokens": tokens}
        trainers = {h: build(Path(folder), pools, handles=h, **sizes) for h in (True, False)}
        batches = {handles: iter(trainer.train_loader) for handles, trainer in trainers.items()}
        costs: dict[bool, list[Cost]] = {handles: [] for handles in trainers}
        for handles, trainer in trainers.items():
            finished = take_step(trainer, batches[handles])  # warm-up step
        nbytes = sum(column.numel() * column.element_size() for column in finished.batch.values())
        del finished
        for _ in range(steps):
            for handles, trainer in trainers.items():
                costs[handles].append(cost_of_step(trainer, batches[handles]))
        rows = [
            Row(workers, handles, median(costs[handles]), steps, *profile(trainer, batches[handles]))
            for handles, trainer in trainers.items()
        ]
        for trainer in trainers.values():
            trainer.shutdown()
    return rows, nbytes


def median(costs: Sequence[Cost]) -> Cost:
    """Return the median of each figure separately."""
    figures = zip(*(vars(cost).values() for cost in costs), strict=True)
    return Cost(*(statistics.median(values) for values in figures))


def table(rows: Sequence[Row]) -> str:
    """Format the rows as a Markdown table."""
    lines = [
        "| workers | handles | seconds per step | driver CPU s | main thread CPU s | MB sent | MB received |",
        "| ---: | :---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        cost = row.cost
        lines.append(
            f"| {row.workers} | {'on' if row.handles else 'off'} | {cost.seconds:.2f} | {cost.cpu_s:.2f} "
            f"| {cost.main_thread_s:.2f} | {cost.sent / MB:.1f} | {cost.received / MB:.1f} |"
        )
    return "\n".join(lines)


def parts_table(rows: Sequence[Row]) -> str:
    """Format the trainer thread's CPU time by part of the step as a Markdown table."""
    names = {"__next__": "next prompts", "collect": "generate", "get": "results of updates"}
    lines = ["| workers | handles | " + " | ".join(names.get(p, p) for p in PARTS) + " |"]
    lines.append("| ---: | :---: |" + " ---: |" * len(PARTS))
    for row in rows:
        cells = " | ".join(f"{row.parts[part]:.3f}" for part in PARTS)
        lines.append(f"| {row.workers} | {'on' if row.handles else 'off'} | {cells} |")
    return "\n".join(lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Plot the figures by number of workers."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figures = {
        "driver: CPU seconds per step": lambda cost: cost.cpu_s,
        "driver: MB per step, sent and received": lambda cost: (cost.sent + cost.received) / MB,
        "wall-clock seconds per step (shared cores)": lambda cost: cost.seconds,
    }
    figure, axes = plt.subplots(1, len(figures), figsize=(12, 3.6), layout="constrained")
    for ax, (title, value) in zip(axes, figures.items(), strict=True):
        for handles, style in ((True, "o-"), (False, "s--")):
            own = [row for row in rows if row.handles is handles]
            label = f"handles {'on' if handles else 'off'}"
            ax.plot([row.workers for row in own], [value(row.cost) for row in own], style, label=label)
        ax.set_xscale("log", base=2)
        workers = sorted({row.workers for row in rows})
        ax.set_xticks(workers, [str(count) for count in workers])
        ax.set_ylim(bottom=0)
        ax.set(title=title, xlabel="workers")
        ax.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=110)


def report(rows: Sequence[Row], nbytes: int, options: argparse.Namespace) -> str:
    """Format all results as Markdown."""
    hottest = "\n\n".join(
        f"{row.workers} workers, handles {'on' if row.handles else 'off'}\n" + "\n".join(row.hottest)
        for row in rows
    )
    return f"""{options.prompts} samples of {options.tokens} + {options.tokens} tokens, {nbytes / MB:.1f} MB \
with all columns of a finished PPO step; 4 mini-batches each for critic and actor.
{os.cpu_count()} cores, shared by all processes; torch {torch.__version__}, ray {ray.__version__}; \
medians of {rows[0].steps} steps, alternating with and without handles.

{table(rows)}

CPU seconds of the trainer's thread by part of the step (under the profiler, which slows Python calls):

{parts_table(rows)}

Functions by own CPU time in the profiled step:

```
{hottest}
```
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument(
        "--prompts", type=int, default=1024, help="per batch; a multiple of 4 times the workers"
    )
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a prompt, and of a response")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder for driver_<date>.md and .png")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # otherwise Ray writes a token to the home folder

    rows: list[Row] = []
    for workers in options.workers:
        slots = max(workers, os.cpu_count() or 1)
        ray.init(address="local", num_cpus=slots, include_dashboard=False, log_to_driver=False)
        found, nbytes = measure(workers, prompts=options.prompts, tokens=options.tokens, steps=options.steps)
        ray.shutdown()
        rows += found
        print(table(found), flush=True)
    text = report(rows, nbytes, options)
    print(text)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        name = options.out / f"driver_{datetime.date.today()}"
        draw(rows, name.with_suffix(".png"))
        name.with_suffix(".md").write_text(f"# Cost of the driver\n\n{text}\n![]({name.name}.png)\n")


if __name__ == "__main__":
    main()
