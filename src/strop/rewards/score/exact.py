"""Exact match: the response, stripped of surrounding white space, is the ground truth."""

from __future__ import annotations


def compute_score(solution_str: str, ground_truth: str | int, *, score: float = 1.0) -> float:
    """``score`` when the stripped response equals the stripped ground truth, else 0.

    Raises ``ValueError`` when there is no ground truth.
    """
    if ground_truth is None or not str(ground_truth).strip():
        raise ValueError(f"the ground truth is {ground_truth!r}: expected the text of the answer")
    return score if solution_str.strip() == str(ground_truth).strip() else 0.0
