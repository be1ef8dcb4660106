"""Reward of both systems: the fraction of characters with an even code point. Cheap and never constant."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Return a score in [0, 1]; only ``solution_str`` is used."""
    return sum(ord(character) % 2 == 0 for character in solution_str) / max(len(solution_str), 1)
