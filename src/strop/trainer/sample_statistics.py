"""Statistics of n scored samples a prompt, and intervals of their means over prompts. Pure functions.

Shapes: P prompts, N samples of each prompt, R random draws, A answers, S statistics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_INDICES_AT_ONCE = 1 << 22
"""Numbers of prompts that are drawn at once: 32 MiB."""


def sample_counts(n: int) -> list[int]:
    """Return the k to report: powers of two up to ``n``, and ``n``, without 1, which is the mean."""
    return [*(1 << power for power in range(1, n.bit_length()) if 1 << power < n), *([n] if n > 1 else [])]


def expected_best(scores_PN: np.ndarray, k: int) -> np.ndarray:
    """Return the expected highest score [P] of k of the n samples, drawn without replacement. Exact.

    The i-th lowest score is the highest of C(i-1, k-1) of the C(n, k) draws. For scores of 0 and 1 this is
    pass@k of Chen et al. 2021 (arXiv:2107.03374, equation 1): 1 - C(n-c, k) / C(n, k) with c ones.
    """
    n = scores_PN.shape[1]
    weights_N = np.array([math.comb(rank, k - 1) / math.comb(n, k) for rank in range(n)])
    return np.sort(scores_PN, axis=1) @ weights_N


def expected_worst(scores_PN: np.ndarray, k: int) -> np.ndarray:
    """Return the expected lowest score [P] of k of the n samples, drawn without replacement. Exact."""
    return -expected_best(-scores_PN, k)


def expected_majority(
    scores_PN: np.ndarray, answers_PN: Sequence[Sequence[str | None]], k: int, *, seed: int, draws: int = 200
) -> np.ndarray:
    """Return the mean score [P] of the most frequent answer among k of the n samples.

    An answer's score is the mean of its samples'. Tied answers count equally. Samples without an answer
    (None) do not vote; where none of the k has one, their mean score counts. With k < n the mean is over
    ``draws`` random draws without replacement; with k = n there is one draw, so it is exact.
    """
    n = scores_PN.shape[1]
    rng = np.random.default_rng(seed)
    majorities = []
    for scores_N, answers_N in zip(scores_PN, answers_PN, strict=True):
        # ranks of random numbers: the samples with ranks below k are a draw without replacement
        ranks_RN = rng.random((1 if k == n else draws, n)).argsort(axis=1).argsort(axis=1)
        majorities.append(_majority_score(scores_N, answers_N, ranks_RN < k))
    return np.array(majorities)


def _majority_score(scores_N: np.ndarray, answers_N: Sequence[str | None], drawn_RN: np.ndarray) -> float:
    names = sorted({answer for answer in answers_N if answer is not None})
    silent_N = np.array([answer is None for answer in answers_N])
    if not names:
        return float(scores_N.mean())
    votes_NA = np.array([[float(answer == name) for name in names] for answer in answers_N])
    scores_A = scores_N @ votes_NA / votes_NA.sum(axis=0)
    counts_RA = drawn_RN.astype(np.float64) @ votes_NA
    most_R1 = counts_RA.max(axis=1, keepdims=True)
    won_RA = counts_RA == most_R1
    won_R = won_RA @ scores_A / won_RA.sum(axis=1)
    if silent_N.any():
        won_R = np.where(most_R1[:, 0] > 0, won_R, scores_N[silent_N].mean())
    return float(won_R.mean())


def bootstrap_intervals(
    values_SP: np.ndarray, *, seed: int, resamples: int = 1000, level: float = 0.95
) -> np.ndarray:
    """Return the percentile bootstrap interval [S, 2] of each statistic's mean over prompts (Efron 1979).

    Resamples prompts, not samples: samples of one prompt are correlated. All statistics share the resamples.
    """
    rng = np.random.default_rng(seed)
    n_prompts = values_SP.shape[1]
    at_once = max(_INDICES_AT_ONCE // n_prompts, 1)
    means = []
    for start in range(0, resamples, at_once):
        rows_RP = rng.integers(n_prompts, size=(min(at_once, resamples - start), n_prompts))
        means.append(np.stack([values_P[rows_RP].mean(axis=1) for values_P in values_SP]))
    tail = (1 - level) / 2
    return np.quantile(np.concatenate(means, axis=1), [tail, 1 - tail], axis=1).T
