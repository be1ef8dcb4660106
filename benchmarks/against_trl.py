"""Compare strop with TRL: one iteration of GRPO and of PPO, on the same model, prompts and lengths.

    python benchmarks/against_trl.py [--rounds 3] [--iterations 3] [--threads 2] [--models 5M 30M]
        [--only grpo] [--root OTHER] [--out benchmarks/results/against_trl_DATE.md]

Every run is a separate process, and the systems alternate. Figures are medians over rounds of each run's
median over iterations, without the first iteration. Useful tokens are response tokens, including the end
token; the benchmark fails if response lengths differ from the planned ones. With ``--root`` another checkout
of strop takes the place of strop with vLLM, with the same packages. ``side_by_side/`` has the settings of
each system; ``make bench`` builds the environments of TRL.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import machine
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from side_by_side.inputs import LONGEST, SHORTEST, write_inputs
from side_by_side.record import PHASES
from side_by_side.setting import WARM_UP, Setting
from work import DTYPES, iteration_operations, peak

ROOT = Path(__file__).parents[1]
HERE = ROOT / "benchmarks"
COLUMNS = (*PHASES, "rest", "iteration")


@dataclass(frozen=True)
class System:
    """A system under comparison."""

    name: str
    python: Path
    module: str
    changes: Mapping[str, str] = field(default_factory=dict)
    """Overrides of fields of the setting."""
    options: tuple[str, ...] = ()
    """Overrides of the module's configuration, as ``key=value``."""
    root: Path = ROOT
    """The checkout of strop."""


STROP = System("strop", Path(sys.executable), "strop_run")
VLLM = replace(STROP, name="strop, vLLM", changes={"rollout": "vllm"})
SAMPLER = replace(
    STROP,
    name="strop, rollout's log-probs",
    options=("actor_rollout_ref.actor.use_rollout_log_probs=True",),
)
"""TRL's PPO takes old log-probs from generation, too; by default strop computes them from the samples."""
BFLOAT16 = replace(STROP, name="strop, bfloat16", changes={"precision": "bfloat16"})
GRPO = System("TRL", HERE / ".venv-trl/bin/python", "trl_grpo")
PPO = System("TRL 1.12", HERE / ".venv-trl-ppo/bin/python", "trl_ppo")


@dataclass(frozen=True)
class Comparison:
    """Setting and the systems compared on it; ratios are relative to the system named ``peer``."""

    setting: Setting
    systems: tuple[System, ...]
    peer: str


def comparisons(options: argparse.Namespace, inputs: Path) -> list[Comparison]:
    """Return the comparisons of the table, in order."""
    found = []
    shared = {"inputs": str(inputs), "iterations": options.iterations}
    for model, lengths, precision in itertools.product(
        options.models, ("uneven", "limit"), ("float32", "bfloat16")
    ):
        limit = 128 if lengths == "uneven" else 64
        setting = Setting(model, "grpo", lengths, limit, precision, **shared)
        other = replace(STROP, name=f"strop {options.root.name}", root=options.root) if options.root else VLLM
        found.append(Comparison(setting, (STROP, other, GRPO), GRPO.name))
    for model, more in itertools.product(options.models, ({}, {"kl_coef": 0.05}, {"n": 1})):
        setting = Setting(model, "ppo", "limit", 64, "float32", **more, **shared)
        sampler = [SAMPLER] if setting.kl_coef else []  # otherwise one optimizer step needs no old log-probs
        found.append(Comparison(setting, (STROP, *sampler, BFLOAT16, PPO), PPO.name))
    return [comparison for comparison in found if options.only in comparison.setting.name]


def run(system: System, setting: Setting, threads: int, folder: Path) -> dict:
    """Run one process, check its response lengths and return its record."""
    setting = replace(setting, **system.changes)
    written, record = setting.write(folder / "setting.json"), folder / "record.json"
    parts = ("benchmarks", "examples", "src") if system.module == STROP.module else ("benchmarks",)
    process = subprocess.run(
        [system.python, "-m", f"side_by_side.{system.module}", written, record, *system.options],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(system.root / part) for part in parts),
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        },
        capture_output=True,
        text=True,
    )
    if process.returncode:
        raise SystemExit(f"{system.name}, {setting.name}:\n{process.stderr[-4000:]}")
    found = json.loads(record.read_text())
    check_lengths(system, setting, found["iterations"])
    return found


def check_lengths(system: System, setting: Setting, iterations: list[dict]) -> None:
    """Raise ``SystemExit`` unless the iterations and response lengths are as planned."""
    if len(iterations) != setting.total_iterations:
        raise SystemExit(f"{system.name}: {len(iterations)} iterations, expected {setting.total_iterations}")
    for number, iteration in enumerate(iterations):
        planned = sorted(setting.planned_lengths(number) or [setting.limit] * setting.samples)
        if iteration["lengths"] != planned:
            raise SystemExit(
                f"{system.name}, {setting.name}: response lengths of iteration {number} differ from the plan"
            )


def medians(runs: list[dict]) -> dict[str, float]:
    """Return a system's median seconds by phase, useful tokens per second and MB."""
    counted = [run["iterations"][WARM_UP:] for run in runs]
    found = {
        column: statistics.median(statistics.median(row[column] for row in rows) for rows in counted)
        for column in COLUMNS
    }
    found["tokens/s"] = statistics.median(
        sum(sum(row["lengths"]) for row in rows) / sum(row["iteration"] for row in rows) for rows in counted
    )
    found["MB"] = statistics.median(run["peak_mb"] for run in runs)
    return found


def share_of_peak(setting: Setting, runs: list[dict], limit: float) -> float:
    """Return the operations that an iteration needs per second of it, relative to ``limit`` (``work.py``)."""
    return statistics.median(
        statistics.median(
            iteration_operations(setting, row["lengths"]) / row["iteration"] / limit
            for row in run["iterations"][WARM_UP:]
        )
        for run in runs
    )


def compare(comparison: Comparison, rounds: int, threads: int) -> list[str]:
    """Run one comparison, alternating between systems; return its table rows."""
    runs: dict[str, list[dict]] = {system.name: [] for system in comparison.systems}
    before = {precision: peak(dtype) for precision, dtype in DTYPES.items()}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for system in comparison.systems:
                runs[system.name].append(run(system, comparison.setting, threads, Path(folder)))
    by_system = {name: medians(found) for name, found in runs.items()}
    for system in comparison.systems:
        setting = replace(comparison.setting, **system.changes)
        limit = max(peak(DTYPES[setting.precision]), before[setting.precision])
        by_system[system.name]["of peak"] = share_of_peak(setting, runs[system.name], limit)
        by_system[system.name]["peak"] = limit / 1e9
    peer = by_system[comparison.peer]
    return [row(comparison.setting, name, found, peer) for name, found in by_system.items()]


def row(setting: Setting, name: str, found: dict[str, float], peer: dict[str, float]) -> str:
    """Format a Markdown table row."""
    cells = [setting.name, name, *(f"{found[column]:.2f}" for column in COLUMNS)]
    cells += [f"{found['tokens/s']:.0f}", f"{found['MB']:.0f}"]
    cells += [f"{found['of peak']:.2f}", f"{found['peak']:.0f}"]
    cells.append(f"{found['tokens/s'] / peer['tokens/s']:.2f}")
    return f"| {' | '.join(cells)} |"


def head(options: argparse.Namespace) -> str:
    """Return the title, description and header of the table."""
    versions = subprocess.run(
        [GRPO.python, "-c", "import trl; print(trl.__version__)"], capture_output=True, text=True, check=True
    ).stdout.strip()
    where = machine.description("torch", "transformers", threads=options.threads)
    titles = ["setting", "system", *COLUMNS, "tokens/s", "MB", "of peak", "peak, GFLOP/s", "ratio"]
    return (
        f"# One iteration of strop and of TRL\n\n{where} TRL {versions} for GRPO, 1.12.0 for PPO.\n"
        "strop generates with its hf rollout unless marked vLLM. "
        f"64 samples of 8 prompts (64 prompts if n=1) of {SHORTEST} to {LONGEST} tokens; "
        "one optimizer step.\n"
        "Seconds per iteration by phase; useful tokens per second; peak resident memory; share of the "
        "speed of a large matrix product in the same precision that the necessary operations reach; "
        f"ratio of tokens/s to TRL's.\nMedians of {options.rounds} alternating runs of "
        f"{options.iterations} iterations after a warm-up.\n\n"
        f"| {' | '.join(titles)} |\n|{' --- |' * 2}{' ---: |' * (len(titles) - 2)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--models", nargs="+", default=["5M", "30M"])
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument("--root", type=lambda path: Path(path).resolve(), help="another checkout of strop")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lines = [head(options)]
    print(lines[0], flush=True)
    with tempfile.TemporaryDirectory() as folder:
        chosen = comparisons(options, Path(folder))
        write_inputs(comparison.setting for comparison in chosen)
        for comparison in chosen:
            rows = compare(comparison, options.rounds, options.threads)
            print("\n".join(rows), flush=True)
            lines += rows
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
