"""What n scored samples of a prompt say of k, and how sure a mean over prompts is. Pure functions.

Everything is exact but the intervals: an expectation over all ways to take k of the n samples. Shapes: P
prompts, N samples of each prompt, S statistics.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

MOST_VOTERS = 1000
"""Samples of a prompt that can vote: C(1000, 500) is 3e299, and float64 ends at 2e308."""
_INDICES_AT_ONCE = 1 << 22


def sample_counts(n: int) -> list[int]:
    """The k that are looked at: powers of two up to ``n``, and ``n``, without 1, which is the mean."""
    return [*(1 << power for power in range(1, n.bit_length()) if 1 << power < n), *([n] if n > 1 else [])]


def expected_best(scores_PN: np.ndarray, k: int) -> np.ndarray:
    """The expected highest score [P] of k of the n samples, drawn without replacement.

    The i-th lowest score is the highest of C(i-1, k-1) of the C(n, k) draws. For scores of 0 and 1 this is
    pass@k of Chen et al. 2021 (arXiv:2107.03374, equation 1): 1 - C(n-c, k) / C(n, k) with c ones.
    """
    n = scores_PN.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"best of k={k} samples: expected 1 to {n}, the samples of a prompt")
    weights_N = np.array([math.comb(rank, k - 1) / math.comb(n, k) for rank in range(n)])
    return np.sort(scores_PN, axis=1) @ weights_N


def expected_worst(scores_PN: np.ndarray, k: int) -> np.ndarray:
    """The expected lowest score [P] of k of the n samples, drawn without replacement."""
    return -expected_best(-scores_PN, k)


def expected_majority(
    scores_PN: np.ndarray, answers_PN: Sequence[Sequence[str | None]], k: int
) -> np.ndarray:
    """The expected score [P] of the answer that most of k of the n samples give, drawn without replacement.

    An answer's score is the mean of its samples'. Of answers with equally many votes each counts alike.
    Samples without an answer (None) do not vote; where all of the k have none, theirs is the score.
    ``ValueError`` for more than ``MOST_VOTERS`` samples of a prompt.
    """
    n = scores_PN.shape[1]
    if n > MOST_VOTERS:
        raise ValueError(f"a majority of {n} samples: expected at most {MOST_VOTERS}")
    if not 1 <= k <= n:
        raise ValueError(f"majority of k={k} samples: expected 1 to {n}, the samples of a prompt")
    return np.array(
        [_majority_of_prompt(*_ballot(s_N, a_N), k) for s_N, a_N in zip(scores_PN, answers_PN, strict=True)]
    )


Votes = tuple[int, float]
"""How many samples give an answer, and the mean of their scores."""


def _ballot(scores_N: np.ndarray, answers_N: Sequence[str | None]) -> tuple[tuple[Votes, ...], Votes]:
    """The votes for each answer, and the samples without one; in an order of their own."""
    by_answer: defaultdict[str | None, list[float]] = defaultdict(list)
    for score, answer in zip(scores_N.tolist(), answers_N, strict=True):
        by_answer[answer].append(score)
    silent = by_answer.pop(None, [])
    votes = sorted((len(scores), sum(scores) / len(scores)) for scores in by_answer.values())
    return tuple(votes), (len(silent), sum(silent) / max(len(silent), 1))


def _majority_of_prompt(votes: tuple[Votes, ...], silent: Votes, k: int) -> float:
    silent_count, silent_score = silent
    winners_S = _winners_scores(votes)
    voters = len(winners_S) - 1
    sums = [silent_score, *winners_S[1:].tolist()]
    draws = (math.comb(silent_count, k - drawn) * sums[drawn] for drawn in range(min(k, voters) + 1))
    return sum(draws) / math.comb(silent_count + voters, k)


@lru_cache(maxsize=1 << 14)
def _winners_scores(votes: tuple[Votes, ...]) -> np.ndarray:
    """For every s from 0 to the number of voters: the winner's score, summed over all draws of s voters.

    For each number of votes v that a winner may have, the answers that have as many are gone through one by
    one. Kept are, by winners so far (w) and voters drawn (s), the number of ways to get there and the sum of
    the winners' scores over them; the voters of all other answers are drawn freely.
    """
    voters = sum(count for count, _ in votes)
    sums_S = np.zeros(voters + 1)
    for v in range(1, max((count for count, _ in votes), default=0) + 1):
        able = [(count, score) for count, score in votes if count >= v]
        others = voters - sum(count for count, _ in able)
        ways_WS, scores_WS = np.zeros((2, len(able) + 1, voters + 1))
        ways_WS[0, : others + 1] = _binomials(others)
        for count, score in able:
            loses_SS = _convolution(_binomials(count)[:v], voters + 1)
            wins = math.comb(count, v)
            won_WS = wins * (scores_WS + score * ways_WS)
            scores_WS = scores_WS @ loses_SS
            scores_WS[1:, v:] += won_WS[:-1, :-v]
            won_WS = wins * ways_WS
            ways_WS = ways_WS @ loses_SS
            ways_WS[1:, v:] += won_WS[:-1, :-v]
        sums_S += (scores_WS[1:] / np.arange(1, len(able) + 1)[:, None]).sum(axis=0)
    return sums_S


@lru_cache
def _binomials(n: int) -> np.ndarray:
    """C(n, 0) to C(n, n)."""
    return np.array([math.comb(n, drawn) for drawn in range(n + 1)], dtype=np.float64)


def _convolution(polynomial: np.ndarray, size: int) -> np.ndarray:
    """The matrix [size, size] that multiplies a row of coefficients, as a polynomial, by ``polynomial``."""
    padded = np.zeros(2 * size)
    padded[: len(polynomial)] = polynomial
    places = np.arange(size)
    return padded[places[None, :] - places[:, None]]  # a negative index reads the zeros at the end


def bootstrap_intervals(
    values_SP: np.ndarray, *, seed: int, resamples: int = 1000, level: float = 0.95
) -> np.ndarray:
    """The percentile bootstrap interval [S, 2] of each statistic's mean over the prompts (Efron 1979).

    Prompts are resampled, not samples: those of one prompt are alike. All statistics see the same resamples.
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
