"""Measure throughput by number of samples, response length, vocabulary size and number of ranks.

    python benchmarks/growth.py [--axes samples tokens vocabulary ranks] [--rounds 3] [--threads 2]
        [--out benchmarks/results/growth_DATE]

GRPO on the 5M model in float32: 64 samples of 64 tokens, a vocabulary of 4096 and one process; each axis
varies one of these. Every point is a separate training run (``side_by_side/strop_run.py``) with old log-probs
in a separate pass, so that their phase is visible. Figures are response tokens per second by phase, medians
over the rounds, and the share of the speed of a large matrix product that the necessary operations of an
iteration reach. On the ranks axis every rank is a Ray process with one thread. ``--out`` writes a table and a
plot.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import machine
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from against_trl import STROP, run
from side_by_side.inputs import write_inputs
from side_by_side.record import PHASES
from side_by_side.setting import WARM_UP, Setting
from work import iteration_operations, peak

from rollout_hf import MODELS

AXES = {
    "samples": (16, 64, 128, 256, 512),
    "tokens": (64, 128, 256, 512, 1024),
    "vocabulary": (1024, 4096, 16384, 65536, 151936),
    "ranks": (1, 2),
}
OF_PEAK = "of peak"
PEAK = "peak, GFLOP/s"
OPERATIONS = "operations"
APART = "actor_rollout_ref.actor.old_log_prob_from_update=False"


@dataclass(frozen=True)
class Point:
    """One value on one axis."""

    axis: str
    value: int
    setting: Setting
    keys: tuple[str, ...] = (APART,)
    threads: int = 1

    @property
    def all_threads(self) -> int:
        """Threads of all processes."""
        return self.value if self.axis == "ranks" else self.threads


def point(axis: str, value: int, base: Setting, threads: int) -> Point:
    """Return the base setting with the axis set to ``value``."""
    if axis == "samples":
        return Point(axis, value, replace(base, samples=value), threads=threads)
    if axis == "tokens":
        return Point(axis, value, replace(base, limit=value), threads=threads)
    if axis == "vocabulary":
        name = f"{base.model}-{value}-words"
        MODELS[name] = {**MODELS[base.model], "vocab_size": value}
        return Point(axis, value, replace(base, model=name), threads=threads)
    keys = (APART, f"trainer.n_gpus_per_node={value}", "trainer.worker_group=ray")
    return Point(axis, value, base, keys)


def measure(place: Point, folder: Path, limits: dict[int, float]) -> dict[str, float]:
    """Run one point; return response tokens per second by phase, and the point's operations per second.

    ``limits`` gets the operations per second of the fastest large product so far, by number of threads.
    """
    system = replace(STROP, options=place.keys)
    rows = run(system, place.setting, place.threads, folder)["iterations"][WARM_UP:]
    tokens = sum(sum(row["lengths"]) for row in rows)
    speeds = {phase: tokens / sum(row[phase] for row in rows) for phase in (*PHASES, "iteration")}
    # GRPO counts four passes; old log-probs are a fifth
    operations = 5 / 4 * sum(iteration_operations(place.setting, row["lengths"]) for row in rows)
    torch.set_num_threads(place.all_threads)
    limits[place.all_threads] = max(peak(torch.float32), limits.get(place.all_threads, 0.0))
    return speeds | {OPERATIONS: operations / sum(row["iteration"] for row in rows)}


def medians(rounds: Sequence[dict[str, float]], limit: float) -> dict[str, float]:
    """Return the medians of one point's figures over the rounds, and the share of the peak, ``limit``."""
    speeds = {phase: statistics.median(one[phase] for one in rounds) for phase in rounds[0]}
    return speeds | {OF_PEAK: speeds[OPERATIONS] / limit, PEAK: limit / 1e9}


def table(found: Sequence[tuple[Point, dict[str, float]]]) -> str:
    """Format results as a Markdown table."""
    phases = (*PHASES, "iteration")
    columns = ("axis", "value", *phases, OF_PEAK, PEAK)
    lines = [f"| {' | '.join(columns)} |", f"| --- |{' ---: |' * (len(columns) - 1)}"]
    for place, speeds in found:
        cells = [f"{speeds[phase]:.0f}" for phase in phases]
        cells += [f"{speeds[OF_PEAK]:.2f}", f"{speeds[PEAK]:.0f}"]
        lines.append(f"| {place.axis} | {place.value} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(found: Sequence[tuple[Point, dict[str, float]]], path: Path) -> None:
    """Plot one panel per axis and one curve per phase."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    axes = list(dict.fromkeys(place.axis for place, _ in found))
    figure, panels = plt.subplots(
        1, len(axes), figsize=(3.4 * len(axes), 3.4), layout="constrained", sharey=True, squeeze=False
    )
    for axis, panel in zip(axes, panels[0], strict=True):
        own = [(place.value, speeds) for place, speeds in found if place.axis == axis]
        for phase in (*PHASES, "iteration"):
            panel.plot(
                [value for value, _ in own],
                [speeds[phase] for _, speeds in own],
                "k--" if phase == "iteration" else "o-",
                label=phase,
            )
        panel.set(xscale="log", yscale="log", title=axis)
        panel.set_xticks([value for value, _ in own], [str(value) for value, _ in own], rotation=30)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("response tokens per second")
    panels[0][-1].legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--axes", nargs="+", default=list(AXES), choices=AXES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, help="write FILE.md and FILE.png")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = Setting("5M", "grpo", "limit", 64, "float32", folder, iterations=1)
        places = [point(axis, value, base, options.threads) for axis in options.axes for value in AXES[axis]]
        write_inputs(place.setting for place in places)
        limits: dict[int, float] = {}
        runs = [[measure(place, Path(folder), limits) for place in places] for _ in range(options.rounds)]
    found = [
        (place, medians(several, limits[place.all_threads]))
        for place, several in zip(places, zip(*runs, strict=True), strict=True)
    ]
    print(table(found))
    if options.out:
        where = machine.description("torch", "transformers", "ray", threads=options.threads)
        name = options.out.name
        title = "# Response tokens per second by scale"
        about = f"{where}\n{' '.join(__doc__.split(chr(10) * 2)[2].split())}"
        options.out.with_name(f"{name}.md").write_text(
            f"{title}\n\n{about}\n\n{table(found)}\n\n![]({name}.png)\n"
        )
        draw(found, options.out.with_name(f"{name}.png"))


if __name__ == "__main__":
    main()
