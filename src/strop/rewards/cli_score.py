"""``strop score FILE``: the score of every answer in a file, summed up by data source."""

from __future__ import annotations

import argparse
import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from strop.errors import ConfigError, DataError
from strop.rewards.answer_file import (
    GROUND_TRUTH_COLUMNS,
    RESPONSE_COLUMNS,
    find_column,
    read_rows,
    value_at,
)
from strop.rewards.custom import load_custom_reward
from strop.rewards.process import RewardProcess
from strop.rewards.records import Outcome, Sample
from strop.rewards.router import Router, unknown_source


@dataclass
class _Tally:
    """What is known of one data source so far."""

    scores: list[float] = field(default_factory=list)
    errors: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the file and the options to ``parser``."""
    parser.add_argument("file", help="parquet or JSONL, one answer a row")
    add = parser.add_argument
    add(
        "--response-column",
        help=f"the text to score; a dot reaches into nested columns, as in extra_info.answer "
        f"(default: the first of {', '.join(RESPONSE_COLUMNS)})",
    )
    add(
        "--ground-truth-column",
        help=f"the right answer (default: the first of {', '.join(GROUND_TRUTH_COLUMNS)})",
    )
    add("--data-source-column", default="data_source", help="says which scorer is used (data_source)")
    add("--data-source", help="the data source of all rows, for a file without such a column")
    add("--custom", metavar="PATH", help="score with a function from this Python file")
    add("--name", default="compute_score", help="name of that function (compute_score)")
    add("--limit", type=int, help="score only the first rows")
    add("--timeout", type=float, default=10.0, help="seconds that one answer may take (10)")


def run(arguments: argparse.Namespace, console: Console | None = None) -> int:
    """Score the file and print the table. Status 1 when answers could not be scored, else 0.

    Raises:
        DataError: the file, a row or a column cannot be used.
        ConfigError: the custom function cannot be used, or ``--limit`` or ``--timeout`` is not positive.
        RewardError: a data source without a scorer.
    """
    for option in ("limit", "timeout"):
        value = getattr(arguments, option)
        if value is not None and value <= 0:
            raise ConfigError(f"--{option} {value}: expected a number above 0")
    console = console or Console()
    custom = load_custom_reward(arguments.custom, arguments.name)
    router = Router()
    tallies: defaultdict[str, _Tally] = defaultdict(_Tally)
    first_error = ""
    with RewardProcess(custom or router, timeout_s=arguments.timeout) as process:
        samples = _samples(arguments)
        for sample in track(samples, "Scoring", console=console, transient=True, total=arguments.limit):
            if custom is None and sample.data_source not in router.sources:
                raise unknown_source(sample.data_source, router.sources)
            outcome = process.evaluate(sample)
            error = _count(tallies[sample.data_source], outcome)
            first_error = first_error or error
    if not tallies:
        raise DataError(f"{arguments.file}: there are no rows in it")
    console.print(_table(tallies))
    if first_error:
        console.print(f"The first answer that could not be scored:\n{first_error}", markup=False)
    return 1 if first_error else 0


def _samples(arguments: argparse.Namespace) -> Iterator[Sample]:
    rows = itertools.islice(enumerate(read_rows(arguments.file), start=1), arguments.limit)
    response = truth = None
    for number, row in rows:
        try:
            response = response or arguments.response_column or _response_column(row)
            truth = truth or arguments.ground_truth_column or _ground_truth_column(row)
            yield _sample(arguments, row, response, truth)
        except KeyError as error:
            raise DataError(
                f"{arguments.file}, row {number}: no column {error}; the columns are {', '.join(row)}"
            ) from None
        except DataError as error:
            raise DataError(f"{arguments.file}, row {number}: {error}") from None


def _sample(arguments: argparse.Namespace, row: dict[str, Any], response: str, truth: str) -> Sample:
    text = value_at(row, response)
    if not isinstance(text, str):
        raise DataError(f"column {response} holds {text!r:.80}: expected a text")
    source = arguments.data_source or str(value_at(row, arguments.data_source_column))
    return Sample(source, text, value_at(row, truth), row.get("extra_info"))


def _response_column(row: dict[str, Any]) -> str:
    return find_column(row, RESPONSE_COLUMNS, "--response-column")


def _ground_truth_column(row: dict[str, Any]) -> str:
    return find_column(row, GROUND_TRUTH_COLUMNS, "--ground-truth-column")


def _count(tally: _Tally, outcome: Outcome) -> str:
    """Add one outcome; the error, or "" when there is a score."""
    error = outcome.error
    if not error and not outcome.is_finite:
        error = f"the reward function returned {outcome.score} with the parts {outcome.parts}"
    if error:
        tally.errors += 1
    else:
        tally.scores.append(outcome.score)
    return error


def _table(tallies: dict[str, _Tally]) -> Table:
    table = Table("data source", title="Scores", title_justify="left")
    for heading in ("answers", "mean score", "errors"):
        table.add_column(heading, justify="right")
    for source in sorted(tallies):
        scores, errors = tallies[source].scores, tallies[source].errors
        mean = f"{sum(scores) / len(scores):.4f}" if scores else "-"
        table.add_row(source, str(len(scores) + errors), mean, str(errors))
    return table
