"""From the samples of a validation, as they are written to disk, to what they say of each data source."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from strop.rewards.score.answers import Extractor
from strop.tracking.report import Estimate, ShownSample, SourceReport, ValidationReport
from strop.trainer.sample_statistics import (
    MOST_VOTERS,
    bootstrap_intervals,
    expected_best,
    expected_majority,
    expected_worst,
    sample_counts,
)

logger = logging.getLogger(__name__)


def make_report(
    samples: pa.Table, *, n: int, extractor_of: Callable[[str], Extractor | None], seed: int, show: int = 0
) -> ValidationReport:
    """The report on ``samples`` (columns as in ``strop.tracking.samples``), ``n`` adjacent rows a prompt.

    ``extractor_of`` a data source finds the answers that vote, where it has one. ``seed`` draws the
    resamples of the intervals. ``show`` samples, of prompts spread evenly, are there to look at.

    There are no majorities of more than ``MOST_VOTERS`` samples, and a warning says so.
    """
    if n > MOST_VOTERS:
        logger.warning("maj@k is left out: it is worked out for up to %d samples, not %d", MOST_VOTERS, n)
    sources_B = samples["data_source"].to_numpy()
    sources = {
        name: _report_source(samples.filter(pa.array(sources_B == name)), n, extractor_of(name), seed=seed)
        for name in sorted(set(sources_B))
    }
    return ValidationReport(n, sources, _shown(samples, n, show))


def _report_source(samples: pa.Table, n: int, extract: Extractor | None, *, seed: int) -> SourceReport:
    scores_PN = samples["score"].to_numpy().astype(np.float64).reshape(-1, n)
    by_statistic = {f"mean@{n}": scores_PN.mean(axis=1)}
    for k in sample_counts(n):
        by_statistic[f"best@{k}"] = expected_best(scores_PN, k)
        by_statistic[f"worst@{k}"] = expected_worst(scores_PN, k)
    if extract is not None and 1 < n <= MOST_VOTERS:
        answers = [extract(response) for response in samples["response"].to_pylist()]
        answers_PN = [answers[start : start + n] for start in range(0, len(answers), n)]
        for k in sample_counts(n):
            by_statistic[f"maj@{k}"] = expected_majority(scores_PN, answers_PN, k)
    intervals = bootstrap_intervals(np.stack(list(by_statistic.values())), seed=seed)
    return SourceReport(
        prompts=len(scores_PN),
        samples=len(samples),
        scores={
            name: Estimate(float(values_P.mean()), *interval.tolist())
            for (name, values_P), interval in zip(by_statistic.items(), intervals, strict=True)
        },
        mean_length=float(np.mean(samples["response_ids"].combine_chunks().value_lengths())),
        truncated=_share(samples, "truncated"),
        error_rate=_share(samples, "reward_failed") if "reward_failed" in samples.column_names else None,
    )


def _share(samples: pa.Table, column: str) -> float:
    return float(np.mean(samples[column].to_numpy()))


def _shown(samples: pa.Table, n: int, count: int) -> list[ShownSample]:
    """The first sample of ``count`` prompts, the same prompts in every validation."""
    prompts = len(samples) // n
    rows = np.linspace(0, prompts - 1, min(count, prompts)).round().astype(int) * n
    return [
        ShownSample(
            data_source=row["data_source"],
            prompt=row["prompt"],
            response=row["response"],
            ground_truth=row.get("ground_truth"),
            score=row["score"],
        )
        for row in samples.take(pa.array(rows)).to_pylist()
    ]
