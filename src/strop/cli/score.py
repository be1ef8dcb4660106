"""``strop score FILE``: score every answer in a file, with a summary by data source."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from strop.config.reward_parts import SCORERS
from strop.config.schema.base import MOST_PROCESSES, MOST_SECONDS
from strop.data.sources import iterate, value_at
from strop.errors import ConfigError, DataError, RewardError
from strop.rewards.custom import load_custom_reward
from strop.rewards.router import BuiltInScorer, Router
from strop.rewards.worker.feed import Feed
from strop.rewards.worker.pool import reward_process
from strop.rewards.worker.records import Outcome, Sample, ScoreFunction
from strop.terminal import literal

RESPONSE_COLUMNS = ("response", "responses", "solution_str", "solution", "answer")
GROUND_TRUTH_COLUMNS = ("reward_model.ground_truth", "ground_truth")
_WITHOUT_GROUND_TRUTH = ("format", "length")


def _find_column(row: Mapping[str, Any], candidates: tuple[str, ...], option: str) -> str:
    """Return the first candidate that the row has; ``DataError`` names the option that chooses another."""
    for column in candidates:
        with contextlib.suppress(KeyError):
            value_at(row, column)
            return column
    raise DataError(
        f"no column {' or '.join(candidates)}; the columns are {', '.join(row)}. Choose one with {option} "
        "(a dot reaches into nested columns)"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``strop score`` to ``parser``."""
    parser.add_argument(
        "file",
        help="rows with an answer each: .parquet, .jsonl, .json, .csv, owner/name:split",
    )
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
    add("--data-source-column", default="data_source", help="column that selects the scorer (data_source)")
    add("--data-source", help="the data source of all rows, for a file without such a column")
    add("--scorer", choices=SCORERS, help="score all rows with this scorer, whatever their data source")
    add(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of --scorer, as in method=flexible; repeatable (docs/data.md lists them)",
    )
    add("--custom", metavar="PATH", help="score all rows with a function from this Python file")
    add("--name", default="compute_score", help="name of that function (compute_score)")
    add("--limit", type=int, help="score only the first rows")
    add("--timeout", type=float, default=10.0, help="time limit for one answer in seconds (10)")
    add("--workers", type=int, default=1, help="scoring processes (1)")


def run(arguments: argparse.Namespace, console: Console | None = None) -> int:
    """Score the file and print the table; return 1 if answers could not be scored, else 0.

    All rows are read, and every data source checked, before the first answer is scored.
    """
    for option, most in {"limit": math.inf, "timeout": MOST_SECONDS, "workers": MOST_PROCESSES}.items():
        value = getattr(arguments, option)
        if value is not None and not 0 < value <= most:
            bound = f", at most {most}" if math.isfinite(most) else ""
            raise ConfigError(f"--{option} {value}: expected a number above 0{bound}")
    console = console or Console()
    scorer = _scorer(arguments)
    samples = list(_samples(arguments))
    if not samples:
        raise DataError(f"{arguments.file}: there are no rows in it")
    _require_ready(scorer, Counter(sample.data_source for sample in samples), arguments.timeout)
    by_source: defaultdict[str, list[Outcome]] = defaultdict(list)
    first_error = ""
    pool = reward_process(scorer, num_workers=arguments.workers, timeout_s=arguments.timeout)
    with contextlib.closing(pool):
        outcomes = pool.evaluate_all(Feed.of(samples))
        progress = track(outcomes, "Scoring", console=console, transient=True, total=len(samples))
        for sample, outcome in zip(samples, progress, strict=True):
            by_source[sample.data_source].append(outcome)
            first_error = first_error or outcome.error
    console.print(_table(by_source))
    if first_error:
        console.print(literal(f"The first answer that could not be scored:\n{first_error}"))
    return 1 if first_error else 0


def _scorer(arguments: argparse.Namespace) -> ScoreFunction:
    """Return the user's function, one scorer for all rows, or the router by data source."""
    if arguments.option and arguments.scorer is None:
        raise ConfigError(
            f"--option {arguments.option[0]}: it is an option of --scorer, which is not given "
            f"(one of {', '.join(SCORERS)})"
        )
    if arguments.scorer is None:
        return load_custom_reward(arguments.custom, arguments.name) or Router()
    if arguments.custom is not None:
        raise ConfigError("--custom and --scorer: each scores all rows; leave one out")
    options = dict(map(_read_option, arguments.option))
    if arguments.scorer == "length" and options.get("unit") == "tokens":
        raise ConfigError("--option unit=tokens: the file has texts without tokens; use words or characters")
    return BuiltInScorer(arguments.scorer, options, where=f"--scorer {arguments.scorer}")


def _read_option(text: str) -> tuple[str, Any]:
    """Return name and value of an option; the value is JSON (a number, true, a list) or plain text."""
    name, is_given, value = text.partition("=")
    if not is_given:
        raise ConfigError(f"--option {text}: expected KEY=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _require_ready(scorer: ScoreFunction, rows: Counter[str], timeout_s: float) -> None:
    """Require a scorer that works on this machine, within the timeout, for every data source."""
    if isinstance(scorer, BuiltInScorer):
        _require_time(scorer.require_ready, timeout_s)
    if not isinstance(scorer, Router):
        return
    if unknown := {source: count for source, count in sorted(rows.items()) if source not in scorer.sources}:
        found = ", ".join(f"{source!r} ({count} rows)" for source, count in unknown.items())
        raise RewardError(
            f"data_source {found} has no scorer (known: {', '.join(scorer.sources)}). Score all rows with "
            f"--scorer NAME ({', '.join(SCORERS)}) or with your own function, --custom PATH"
        )
    for source in rows:
        _require_time(functools.partial(scorer.require_ready, source), timeout_s)


def _require_time(require_ready: Callable[[float], None], timeout_s: float) -> None:
    require_ready(math.inf)  # first without a deadline: does it work on this machine?
    try:
        require_ready(timeout_s)
    except ConfigError as error:
        raise ConfigError(
            f"--timeout {timeout_s:g} is less than the limit of a program; raise it, or lower the limit with "
            f"--scorer code --option timeout_s=SECONDS. As configuration keys: {error}"
        ) from None


def _samples(arguments: argparse.Namespace) -> Iterator[Sample]:
    response, truth = arguments.response_column, arguments.ground_truth_column
    for number, row in enumerate(itertools.islice(iterate(arguments.file), arguments.limit), start=1):
        try:
            response = response or _find_column(row, RESPONSE_COLUMNS, "--response-column")
            if arguments.scorer not in _WITHOUT_GROUND_TRUTH:
                truth = truth or _find_column(row, GROUND_TRUTH_COLUMNS, "--ground-truth-column")
            text = value_at(row, response)
            if not isinstance(text, str):
                raise DataError(f"column {response} holds {text!r:.80}: expected a text")
            ground_truth = None if truth is None else value_at(row, truth)
            if truth and not arguments.custom and (ground_truth is None or ground_truth != ground_truth):
                raise DataError(f"column {truth} holds {ground_truth}: expected the answer")
            yield Sample(_source(arguments, row), text, ground_truth, row.get("extra_info"))
        except KeyError as error:
            raise DataError(
                f"{arguments.file}, row {number}: no column {error}; the columns are {', '.join(row)}"
            ) from None
        except DataError as error:
            raise DataError(f"{arguments.file}, row {number}: {error}") from None


def _source(arguments: argparse.Namespace, row: dict[str, Any]) -> str:
    """Return the row's data source; with one scorer for all rows the column is optional."""
    if arguments.data_source:
        return arguments.data_source
    try:
        return str(value_at(row, arguments.data_source_column))
    except KeyError:
        if arguments.scorer is None:
            raise
        return arguments.scorer


def _table(by_source: Mapping[str, list[Outcome]]) -> Table:
    table = Table("data source", title="Scores", title_justify="left")
    for heading in ("answers", "mean score", "errors"):
        table.add_column(heading, justify="right")
    for source, outcomes in sorted(by_source.items()):
        scores = [outcome.score for outcome in outcomes if not outcome.error and outcome.score is not None]
        mean = f"{sum(scores) / len(scores):.4f}" if scores else "-"
        table.add_row(literal(source), str(len(outcomes)), mean, str(len(outcomes) - len(scores)))
    return table
