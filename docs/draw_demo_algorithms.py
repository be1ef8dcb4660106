"""Draw docs/demo_algorithms.png from five runs of the demo:

for a in ppo grpo reinforce++ rloo remax; do make demo ALGORITHM=$a; done
.venv/bin/python docs/draw_demo_algorithms.py runs/demo
"""

from __future__ import annotations

import sys
from pathlib import Path

from strop.tracking.curves import draw_curve, series
from strop.tracking.figures import COLOURS, agg_figure, plain_axes, save_figure
from strop.tracking.jsonl import METRICS_FILE, read_metrics

LABELS = {"ppo": "PPO", "grpo": "GRPO", "reinforce++": "REINFORCE++", "rloo": "RLOO", "remax": "ReMax"}
KEY = "val/test_score/strop/arithmetic"
OUT = Path(__file__).with_name("demo_algorithms.png")


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo")
    figure = agg_figure(7.5, 4.5)
    ax = figure.subplots()
    for colour, (name, label) in zip(COLOURS, LABELS.items(), strict=False):
        steps = read_metrics(folder / f"{name}-seed1" / METRICS_FILE)
        draw_curve(ax, *series(steps, KEY), label=label, colour=colour)
    plain_axes(ax, "Demo: sampled answers to held-out additions that are right", KEY)
    ax.set_xlabel("step")
    ax.legend(frameon=False)
    save_figure(figure, OUT)


if __name__ == "__main__":
    main()
