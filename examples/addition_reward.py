"""Example of a custom reward function: 1 if the last whole number in the response is the sum.

Set `custom_reward_function.path=examples/addition_reward.py` to train on it.
"""

from __future__ import annotations

import re


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None
) -> float:
    """Return 1.0 if the response is correct, else 0.0; ``solution_str`` excludes the prompt."""
    numbers = re.findall(r"\d+", solution_str)
    return float(bool(numbers) and numbers[-1] == ground_truth)
