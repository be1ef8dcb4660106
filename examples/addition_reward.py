"""A reward function of one's own: 1 when the last whole number of the answer is the sum.

`custom_reward_function.path=examples/addition_reward.py` is all that it takes to train on it.
"""

from __future__ import annotations

import re


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None
) -> float:
    """1.0 or 0.0; ``solution_str`` is the decoded response without the prompt."""
    numbers = re.findall(r"\d+", solution_str)
    return float(bool(numbers) and numbers[-1] == ground_truth)
