"""Scorers: pure functions ``compute_score(solution_str, ground_truth, **options) -> float``, without torch.

A scorer sees the response alone. An unreadable ground truth is a ``ValueError`` (the data are wrong), never a
score of 0 (the answer is wrong).
"""
