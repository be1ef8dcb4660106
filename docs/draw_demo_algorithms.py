"""Draw docs/demo_algorithms.png from five runs of the demo:

for a in ppo grpo reinforce++ rloo remax; do make demo ALGORITHM=$a; done
.venv/bin/python docs/draw_demo_algorithms.py runs/demo
"""

from __future__ import annotations

import sys
from pathlib import Path

from strop.tracking.curves import draw_comparison

LABELS = {"ppo": "PPO", "grpo": "GRPO", "reinforce++": "REINFORCE++", "rloo": "RLOO", "remax": "ReMax"}


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo")
    runs = {label: folder / f"{name}-seed1" for name, label in LABELS.items()}
    draw_comparison(
        runs,
        "val/test_score/strop/arithmetic",
        Path(__file__).with_name("demo_algorithms.png"),
        title="Demo: sampled answers to held-out additions that are right",
    )


if __name__ == "__main__":
    main()
