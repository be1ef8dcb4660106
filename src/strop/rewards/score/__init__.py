"""Scorers: pure functions ``compute_score(solution_str, ground_truth, **options) -> float``, without torch.

A scorer judges the response alone. A ground truth that it cannot read is a ``ValueError`` (the data is
wrong), never a score of 0 (the answer is wrong).
"""
