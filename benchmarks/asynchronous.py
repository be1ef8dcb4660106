"""Time per token of runs that generate ahead of training against synchronous runs on the same cores.

``python benchmarks/asynchronous.py`` alternates blocks of iterations of all modes in one process. The first
iteration of a block is not counted, and a block ends when nothing is being generated.

1. Real cores: GRPO of a 5M model with uneven lengths. Synchronous with one thread and with all, and
   ``async_steps=1`` and 4 with a thread for each side. The bound is the longer of generation and learning
   with one thread, of the same run.
2. An engine whose decode step costs a fixed time, as on a GPU: long tails of lengths, updates of half the
   time of generation. What more than one step ahead brings.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from machine import description
from side_by_side.inputs import write_inputs
from side_by_side.planned_ends import END, forced_ends
from side_by_side.setting import Setting
from side_by_side.strop_run import overrides
from torch import Tensor

from strop.config.load import load_config
from strop.protocol import DataProto
from strop.rollout.hf import engine as hf
from strop.trainer.build import build_trainer
from strop.workers.policy import ActorRolloutRefWorker

_AHEAD = (
    "actor_rollout_ref.hybrid_engine=False",
    "trainer.resource_pools={learner: [1], rollout: [1]}",
    "trainer.placement={Rollout: rollout}",
    "trainer.worker_group=local",
    "actor_rollout_ref.actor.rollout_is=token",
)


def geometric(stream: random.Random, limit: int) -> int:
    """Return a length with a mean of a quarter of the limit."""
    return min(limit, 1 + int(math.log(1 - stream.random()) / math.log(1 - 4 / limit)))


def lognormal(stream: random.Random, limit: int) -> int:
    """Return a length with a mean of about 60 and a long tail (sigma 1)."""
    return min(limit, max(1, int(stream.lognormvariate(math.log(60) - 0.5, 1.0))))


@contextlib.contextmanager
def planned(setting: Setting, length: Any, step_s: float) -> Generator[None]:
    """End each sample at a length that its seed determines, and let a decode step take ``step_s`` longer."""
    draw = hf.draw_uniforms

    def draw_with_ends(seeds: Iterable[int], tokens: int) -> Tensor:
        seeds = list(seeds)
        uniforms_RT = draw(seeds, tokens)
        ends = torch.tensor([length(random.Random(seed), setting.limit) - 1 for seed in seeds])
        known = ends < tokens
        uniforms_RT[torch.arange(len(seeds))[known], ends[known]] = END
        return uniforms_RT

    with forced_ends(setting, draw_with_ends, step_s):
        yield


class Mode:
    """A trainer whose iterations are timed."""

    def __init__(self, name: str, options: list[str], *, threads: int) -> None:
        self.name, self.threads = name, threads
        torch.set_num_threads(threads)
        self.trainer = build_trainer(load_config(options))
        self.trainer.init_workers()
        self._prompts: Iterator[DataProto] = iter(self.trainer.train_loader)
        self.wall: list[float] = []
        self.phases: defaultdict[str, list[float]] = defaultdict(list)
        """Milliseconds per token of each block, by phase."""

    def block(self, iterations: int) -> None:
        """Run one iteration that is not counted, and ``iterations`` that are."""
        torch.set_num_threads(self.threads)
        trainer, seconds, tokens = self.trainer, defaultdict(float), 0
        for number in range(iterations + 1):
            start, cpu = time.perf_counter(), time.process_time()
            batch, _ = trainer.step(next(self._prompts))
            trainer.global_step += 1
            timing = trainer.timer.take()
            if number:
                seconds["wall"] += time.perf_counter() - start
                seconds["CPU"] += time.process_time() - cpu
                for phase in ("gen", "wait_samples"):
                    seconds[phase] += timing.get(f"timing_s/{phase}", 0.0)
                tokens += int(batch.batch["response_mask"].sum())
        while trainer.pipeline is not None and not all(b.is_done() for b in trainer.pipeline._batches):
            time.sleep(0.01)
        for name, value in seconds.items():
            self.phases[name].append(1000 * value / tokens)

    def median(self, phase: str) -> float:
        """Return the median over blocks, in milliseconds per token."""
        return statistics.median(self.phases[phase])


def compare(
    setting: Setting, modes: dict[str, tuple[int, list[str]]], rounds: int, folder: Path
) -> list[Mode]:
    """Alternate the modes: name -> (threads, overrides)."""
    common = [
        *overrides(setting, folder / "run"),
        "trainer.total_training_steps=100000",
        "trainer.save_freq=-1",
        "actor_rollout_ref.actor.old_log_prob_from_update=True",
    ]
    made = [
        Mode(name, [*common, f"trainer.default_local_dir={folder / str(number)}", *options], threads=threads)
        for number, (name, (threads, options)) in enumerate(modes.items())
    ]
    for mode in made:
        mode.block(1)
        mode.phases.clear()
    for number in range(rounds):
        for mode in made:
            mode.block(setting.iterations)
            print(f"round {number + 1}: {mode.name}: {mode.phases['wall'][-1]:.2f} ms per token", flush=True)
    for mode in made:
        mode.trainer.shutdown()
    return made


def table(modes: list[Mode]) -> list[str]:
    """Return a table of milliseconds per token."""
    lines = ["| mode | wall | generation | learner waits | CPU |", "| --- | --- | --- | --- | --- |"]
    for mode in modes:
        row = " | ".join(f"{mode.median(phase):.2f}" for phase in ("wall", "gen", "wait_samples", "CPU"))
        lines.append(f"| {mode.name} | {row} |")
    return lines


def slow_update(seconds: float) -> Any:
    """Return a patch that lets an update take longer."""
    plain = ActorRolloutRefWorker.update_actor_on_policy

    @functools.wraps(plain)
    def update(self: Any, batch: DataProto) -> Any:
        time.sleep(seconds)
        return plain(self, batch)

    return mock.patch.object(ActorRolloutRefWorker, "update_actor_on_policy", update)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="5M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=3)
    arguments = parser.parse_args()
    cores = torch.get_num_threads()
    lines = [description("torch", "transformers", threads=cores), ""]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        setting = Setting(
            arguments.model, "grpo", "uneven", 128, "float32", str(folder), iterations=arguments.iterations
        )
        throttled = Setting("140k", "grpo", "uneven", 512, "float32", str(folder), iterations=6)
        write_inputs([setting, throttled])
        with planned(setting, geometric, 0.0):
            modes = compare(
                setting,
                {
                    "synchronous, 1 thread": (1, []),
                    f"synchronous, {cores} threads": (cores, []),
                    **{f"async_steps={s}": (cores, [*_AHEAD, f"trainer.async_steps={s}"]) for s in (1, 4)},
                },
                arguments.rounds,
                folder / "real",
            )
        single, every, ahead, _ = modes
        learn = single.median("wall") - single.median("gen")
        bound = max(single.median("gen"), learn)
        lines += [
            f"## {arguments.model}, uneven lengths, real cores: milliseconds per response token",
            "",
            *table(modes),
            "",
            f"generation / learning with 1 thread: {single.median('gen') / learn:.2f}; "
            f"async_steps=1 / the longer of both: {ahead.median('wall') / bound:.2f}; "
            f"speed-up over 1 thread {single.median('wall') / ahead.median('wall'):.2f}, "
            f"over {cores} threads {every.median('wall') / ahead.median('wall'):.2f}",
            "",
        ]
        with planned(throttled, lognormal, 0.005), slow_update(1.0):
            modes = compare(
                throttled,
                {
                    "synchronous": (1, []),
                    **{f"async_steps={s}": (cores, [*_AHEAD, f"trainer.async_steps={s}"]) for s in (1, 2, 4)},
                },
                max(arguments.rounds // 2, 2),
                folder / "throttled",
            )
        one, four = modes[1], modes[3]
        lines += [
            "## A decode step of 5 ms, long tails, updates of 1 s: milliseconds per response token",
            "",
            *table(modes),
            "",
            f"speed-up of async_steps=4 over 1: {one.median('wall') / four.median('wall'):.2f}",
        ]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
