"""The report of a validation, as metrics, as JSON and as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from rich.table import Table

from strop.terminal import table
from strop.tracking.text import VALIDATION_PREFIX, format_number

SAMPLES_NAME, PAIRS_NAME = "val/generations", "val/preferences"
"""Names under which trackers record the shown samples or pairs."""

_PROMPT_CHARACTERS = 160
_RESPONSE_CHARACTERS = 400
_COLUMNS = ("mean", "best", "maj")
"""Statistics over all n samples that are columns of the table; the others are metrics only."""


class Estimate(NamedTuple):
    """A mean over prompts and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class SourceReport:
    """Results of one data source."""

    prompts: int
    samples: int
    scores: Mapping[str, Estimate]
    """``mean@n``, and for k up to n ``best@k``, ``worst@k`` and, where answers are known, ``maj@k``."""
    mean_length: float
    """Mean sampled tokens of a response."""
    truncated: float
    """Share of responses that were cut, without a stop token."""
    error_rate: float | None
    """Share that could not be scored; None if a user's reward function does not report it."""
    hidden_tokens: float | None = None
    """Mean tokens of a response that its text lacks; None if the rollout does not count them."""


@dataclass(frozen=True)
class ShownSample:
    """A sample for display."""

    data_source: str
    prompt: str
    response: str
    """With special tokens if its scored text lacks some of them."""
    ground_truth: str | None
    score: float

    def figures(self) -> dict[str, float]:
        return {"score": self.score}

    def texts(self) -> tuple[str | None, ...]:
        """Return prompt, response and ground truth."""
        return self.prompt, self.response, self.ground_truth

    def text(self) -> str:
        """Return prompt, response and ground truth as one text."""
        return f"{self.prompt}\n\n{self.response}\n\ntruth: {self.ground_truth}"


@dataclass(frozen=True)
class ShownPair:
    """A pair of answers for display."""

    data_source: str
    prompt: str
    chosen: str
    rejected: str
    chosen_score: float
    """Score of a reward model, or reward of the loss in preference optimization."""
    rejected_score: float

    def figures(self) -> dict[str, float]:
        return {"chosen": self.chosen_score, "rejected": self.rejected_score}

    def texts(self) -> tuple[str | None, ...]:
        """Return prompt and both answers."""
        return self.prompt, self.chosen, self.rejected

    def text(self) -> str:
        """Return prompt and both answers as one text."""
        return f"{self.prompt}\n\nchosen: {self.chosen}\n\nrejected: {self.rejected}"


@dataclass(frozen=True)
class ValidationReport:
    """Results of one validation by data source, in alphabetical order, with samples for display."""

    n: int
    """Samples per prompt."""
    sources: Mapping[str, SourceReport]
    shown: Sequence[ShownSample] | Sequence[ShownPair] = ()
    pictures: Sequence[Sequence[str]] = ()
    """Names of the pictures of each shown sample, where the data set has some."""

    @property
    def shown_name(self) -> str:
        """Name under which trackers record ``shown``."""
        return PAIRS_NAME if self.shown and isinstance(self.shown[0], ShownPair) else SAMPLES_NAME

    def metrics(self) -> dict[str, float]:
        """Return ``val/test_score/<source>``, ``val/hidden_tokens/<source>`` and statistics for n > 1."""
        mean = f"mean@{self.n}"
        metrics = {
            f"{VALIDATION_PREFIX}{name}": found.scores[mean].value for name, found in self.sources.items()
        }
        metrics |= {
            f"val/hidden_tokens/{name}": found.hidden_tokens
            for name, found in self.sources.items()
            if found.hidden_tokens is not None
        }
        if self.n > 1:
            metrics |= {
                f"val/{name}/{statistic}": estimate.value
                for name, found in self.sources.items()
                for statistic, estimate in found.scores.items()
            }
        return metrics

    def as_json(self) -> dict[str, Any]:
        """Return plain values, with intervals and without samples."""
        sources = {
            name: asdict(found) | {"scores": {key: score._asdict() for key, score in found.scores.items()}}
            for name, found in self.sources.items()
        }
        return {"n": self.n, "sources": sources}


def report_table(report: ValidationReport, *, title: str) -> Table:
    """Return a table with one row per data source and intervals below the statistics."""
    statistics = [f"{name}@{report.n}" for name in _COLUMNS[: 3 if report.n > 1 else 1]]
    rows = (
        (
            source,
            f"{found.prompts:,}",
            f"{found.samples:,}",
            *(_with_interval(found.scores.get(name)) for name in statistics),
            format_number(found.mean_length),
            f"{found.truncated:.1%}",
            "-" if found.error_rate is None else f"{found.error_rate:.1%}",
        )
        for source, found in report.sources.items()
    )
    return table(title, ["data source", "prompts", "samples", *statistics, "tokens", "cut", "errors"], rows)


def shown_table(shown: Sequence[ShownSample] | Sequence[ShownPair], *, title: str) -> Table:
    """Return a table of samples (end of the prompt, response, ground truth, score) or of pairs."""
    is_pair = any(isinstance(one, ShownPair) for one in shown)
    texts = ("prompt", "chosen", "rejected") if is_pair else ("prompt", "response", "truth")
    limits = _PROMPT_CHARACTERS, _RESPONSE_CHARACTERS, _RESPONSE_CHARACTERS if is_pair else _PROMPT_CHARACTERS
    rows = (
        (
            *(_end(text or "", limit) for text, limit in zip(one.texts(), limits, strict=True)),
            *map(format_number, one.figures().values()),
        )
        for one in shown
    )
    numbers = ("chosen", "rejected") if is_pair else ("score",)
    found = table(title, [*texts, *numbers], rows, align="lll", show_lines=True)
    for column in found.columns[: len(texts)]:
        column.ratio = 1 if column.header == "truth" else 2
    return found


def _with_interval(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    return f"{estimate.value:.3f}\n{estimate.low:.3f} to {estimate.high:.3f}"


def _end(text: str, characters: int) -> str:
    """Return the end of a text, where prompts have their question and responses their answer."""
    return text if len(text) <= characters else f"...{text[-characters:]}"
