"""Seconds until a command answers, and until a run shows its first line, its first step and its end.

    python benchmarks/startup.py [--rounds 5] [--src OTHER/src] [--out FILE]

The commands see a model of 100,000 parameters in a folder, a file of sums and a reward function of one line.
With ``--src`` another strop's sources are measured alternately, with the same packages; "-": it has no
such command or line. Seconds by the clock are those of an otherwise idle machine only; CPU seconds, of all
processes of a command, carry over. Bytecode is written before the first round, as by an installation. A run
is three iterations of 8 samples.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import machine

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import tiny_model

REWARD = (
    "def compute_score(solution_str, ground_truth, **_):\n    return float(solution_str == ground_truth)\n"
)
ROWS = "prompt,ground_truth\n" + "".join(f"{a}+{b}=,{a + b}\n" for a in range(5) for b in range(5))
ARGUMENTS = [  # as 0.1.0 takes them, too
    "data.train_files=sums.csv",
    "actor_rollout_ref.model.path=model",
    "custom_reward_function.path=reward.py",
    "data.train_batch_size=8",
    "data.max_response_length=4",
    "algorithm.adv_estimator=reinforce_plus_plus",
    "actor_rollout_ref.rollout.name=hf",
    "trainer.total_training_steps=3",
]
COMMANDS = {
    "strop --help": ["--help"],
    "strop train --help": ["train", "--help"],
    "strop keys lr": ["keys", "lr"],
    "strop check": ["check", *ARGUMENTS],
    "strop train": ["train", *ARGUMENTS],
}
MOMENTS = {"first line": "", "loading the model": "loading the model", "first step": "step 1/"}
"""Of a run, by the beginning of the line that shows it."""


def measure(arguments: list[str], source: Path, folder: Path) -> dict[str, float] | None:
    """Run a command; return its moments, ``end`` and ``CPU`` in seconds, or None if this strop lacks it."""
    # not -m strop, which earlier versions lack
    command = [sys.executable, "-c", "from strop.cli.main import main; raise SystemExit(main())", *arguments]
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    began, found = time.perf_counter(), {}
    child = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = []
    for line in child.stdout:
        lines.append(line)
        for moment, beginning in MOMENTS.items():
            if line.startswith(beginning):
                found.setdefault(moment, time.perf_counter() - began)
    _, status, used = os.wait4(child.pid, 0)
    if status and "invalid choice" in lines[-1]:
        return None
    if status:
        raise SystemExit("".join(lines[-30:]))
    return found | {"end": time.perf_counter() - began, "CPU": used.ru_utime + used.ru_stime}


def median(rounds: list[dict[str, float] | None], title: str) -> str:
    values = [one[title] for one in rounds if one and title in one]
    return f"{statistics.median(values):.2f}" if values else "-"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--src", type=Path, help="sources of another strop")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    sources = {"this": Path(__file__).parents[1] / "src"}
    if options.src:
        sources["other"] = options.src.absolute()
    titles = ("command", "strop", *MOMENTS, "end", "CPU")
    lines = [
        f"# Seconds until a command answers\n\n{machine.description('torch', 'transformers', threads=1)}",
        f"Medians of {options.rounds} rounds.\n",
        f"| {' | '.join(titles)} |\n| --- | --- |{' ---: |' * (len(titles) - 2)}",
    ]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_model.save(folder / "model")
        (folder / "reward.py").write_text(REWARD)
        (folder / "sums.csv").write_text(ROWS)
        for command, arguments in COMMANDS.items():
            found: dict[str, list[dict[str, float] | None]] = {source: [] for source in sources}
            for number in range(options.rounds + 1):
                for source, path in sources.items():
                    out = (
                        [f"trainer.default_local_dir=run-{source}-{number}"]
                        if len(arguments) > len(ARGUMENTS)
                        else []
                    )
                    found[source].append(measure([*arguments, *out], path, folder))
            for source, rounds in found.items():
                figures = [median(rounds[1:], title) for title in titles[2:]]  # the first writes bytecode
                lines.append(f"| `{command}` | {source} | {' | '.join(figures)} |")
                print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
