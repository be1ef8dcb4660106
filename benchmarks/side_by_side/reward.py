"""The reward of both systems: the share of characters with an even code point. Cheap, and never constant."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """In [0, 1]; strop calls it by these names, TRL's runners by ``solution_str`` alone."""
    return sum(ord(character) % 2 == 0 for character in solution_str) / max(len(solution_str), 1)
