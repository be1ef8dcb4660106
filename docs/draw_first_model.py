"""Draw docs/first_model.png from runs of the README's command, one after the other on two idle cores:

for s in 1 2 3; do examples/first_model.sh --out runs/first/seed$s trainer.seed=$s; done
.venv/bin/python docs/draw_first_model.py runs/first/seed*
"""

from __future__ import annotations

import sys
from pathlib import Path

from strop.tracking.curves import draw_curve, series
from strop.tracking.figures import COLOURS, agg_figure, plain_axes, save_figure
from strop.tracking.jsonl import METRICS_FILE, read_metrics

OUT = Path(__file__).with_name("first_model.png")


def main() -> None:
    runs = {folder.name: read_metrics(folder / METRICS_FILE) for folder in map(Path, sys.argv[1:])}
    figure = agg_figure(7.5, 4)
    ax = figure.subplots()
    for colour, (name, steps) in zip(COLOURS, runs.items(), strict=False):
        draw_curve(ax, *series(steps, "critic/score/mean"), label=name, colour=colour)
    numbers, seconds = series(next(iter(runs.values())), "time/from_scratch")
    minutes = ax.secondary_xaxis("top")
    minutes.set_xticks(numbers[4::5], labels=[f"{value / 60:.1f}" for value in seconds[4::5]])
    minutes.set_xlabel(f"minutes since the model was loaded ({next(iter(runs))})")
    plain_axes(ax, "SmolLM2-135M-Instruct on one-digit sums: mean reward", "")
    ax.set_xlabel("iteration")
    ax.set_ylim(0, 1.03)
    ax.legend(frameon=False)
    save_figure(figure, OUT)


if __name__ == "__main__":
    main()
