"""Reward of examples/sums.csv: 1 if the last whole number of the response is the answer."""

import re


def compute_score(response: str, answer: str) -> float:
    """Return 1.0 or 0.0; the parameters are the text that was generated, and the column of the data."""
    numbers = re.findall(r"\d+", response)
    return float(bool(numbers) and numbers[-1] == str(answer))
