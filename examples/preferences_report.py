"""Evaluation of a PPO run against a reward model by the ground truth, from the run folder alone.

Each validation, including the one before the first update, samples answers to the same held-out prompts.
Every answer is therefore compared with those of the initial policy to the same prompt.
"""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pyarrow.parquet as pq
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from strop.tracking.jsonl import METRICS_FILE, read_metrics

from preferences_task import preference

KL_OVER = 5
"""Iterations averaged for the KL of each validation; a single one has only a few hundred samples."""


class Judgement(NamedTuple):
    """Evaluation of the policy at one step."""

    step: int
    preference_rate: float
    """True win rate against the initial policy's answers to the same prompt; a tie counts half."""
    score: float
    """Mean score of the reward model."""
    kl: float
    """KL to the initial policy, in nats per response."""


def judge(run: Path) -> list[Judgement]:
    """Evaluate every validation of a run."""
    kl = {
        line["step"]: line["objective/kl"]
        for line in read_metrics(run / METRICS_FILE)
        if "objective/kl" in line
    }
    found: list[Judgement] = []
    before: dict[str, list[str]] = {}
    for path in sorted((run / "validation").glob("step_*.parquet")):
        step = int(path.stem.removeprefix("step_"))
        samples = pq.read_table(path, columns=["prompt", "response", "score"]).to_pylist()
        answers = _by_prompt(samples)
        before = before or answers
        wins = [
            preference(letters, answer, other)
            for letters, group in answers.items()
            for answer in group
            for other in before[letters]
        ]
        recent = [kl[earlier] for earlier in range(step - KL_OVER + 1, step + 1) if earlier in kl]
        score = fmean(sample["score"] for sample in samples)
        found.append(Judgement(step, fmean(wins), score, fmean(recent) if recent else 0.0))
    return found


def _by_prompt(samples: list[dict[str, Any]]) -> dict[str, list[str]]:
    answers: dict[str, list[str]] = {}
    for sample in samples:
        letters = re.sub(r"<\w+>", "", sample["prompt"])  # strip the special tokens of the chat template
        answers.setdefault(letters, []).append(sample["response"])
    return answers


def show(judgements: list[Judgement], reward_model: Path, console: Console) -> None:
    """Print metrics before and after PPO, and the reward model's accuracy on held-out pairs."""
    accuracy = [
        line["val/accuracy"] for line in read_metrics(reward_model / METRICS_FILE) if "val/accuracy" in line
    ][-1]
    first, last = judgements[0], judgements[-1]
    best = max(judgements, key=lambda judgement: judgement.preference_rate)
    table = Table(title=f"reward model accuracy: {accuracy:.1%} of held-out pairs")
    for column in ("", "before", "after", "change", "best"):
        table.add_column(column, justify="right")
    for name, field in (
        ("true win rate against the initial policy", "preference_rate"),
        ("reward model score", "score"),
        ("KL to the initial policy, nats per response", "kl"),
    ):
        was, now, top = (getattr(judgement, field) for judgement in (first, last, best))
        table.add_row(name, f"{was:.3f}", f"{now:.3f}", f"{now - was:+.3f}", f"{top:.3f}")
    console.print(table)
    console.print(f"best true win rate: iteration {best.step} of {last.step}")


def draw(judgements: list[Judgement], path: Path) -> Path:
    """Plot score, true win rate and KL; a rising score with a falling win rate is reward hacking."""
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    panels = zip(
        figure.subplots(1, 3),
        ("score", "preference_rate", "kl"),
        ("Reward model score", "True win rate against the initial policy", "KL to the initial policy"),
        ("mean", "win rate", "nats per response"),
        strict=True,
    )
    steps = [judgement.step for judgement in judgements]
    for axes, field, title, unit in panels:
        axes.plot(steps, [getattr(judgement, field) for judgement in judgements], color="#0072B2", marker="o")
        axes.set(title=title, ylabel=unit, xlabel="iteration")
        axes.grid(alpha=0.3)
        if field == "preference_rate":
            axes.axhline(0.5, color="#D55E00", linestyle="--", linewidth=1)
            axes.set_ylim(0.0, 1.0)
    figure.savefig(path, dpi=110)
    return path
