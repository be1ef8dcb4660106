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
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from strop.cli.options import in_options, naming_options
from strop.config.paths import expand
from strop.config.reward_parts import SCORERS
from strop.config.schema.base import MOST_PROCESSES, MOST_SECONDS
from strop.data.prompt_table import UNNAMED_SOURCE
from strop.data.sources import iterate, value_at
from strop.errors import ConfigError, DataError, RewardError
from strop.rewards.arguments import BATCH_NAMES, Function, Row, Sample, ScoreFunction, named_values, values_of
from strop.rewards.custom import CustomReward
from strop.rewards.router import BuiltInScorer, Router
from strop.rewards.scorer import Outcome, Scorer
from strop.rewards.worker.pool import Feed, RewardPool
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
        help="rows with an answer each: .parquet, .jsonl, .json, .csv, .tsv, owner/name:split",
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
    add(
        "--prompt-column",
        default="prompt",
        help="the prompt, a text or chat messages, for a --custom function (prompt)",
    )
    add(
        "--tokenizer",
        metavar="MODEL",
        help="a Hugging Face folder, for a --custom function that takes tokens or the text of a chat",
    )
    add("--limit", type=int, help="score only the first rows")
    add("--timeout", type=float, default=10.0, help="time limit for one answer in seconds (10)")
    add("--workers", type=int, default=1, help="scoring processes (1)")
    add(
        "--concurrency",
        type=int,
        default=32,
        help="answers that an async --custom function scores at the same time, in one process (32)",
    )


def run(arguments: argparse.Namespace, console: Console | None = None) -> int:
    """Score the file and print the table; return 1 if answers could not be scored, else 0.

    All rows are read, and every data source checked, before the first answer is scored.
    """
    bounds = {
        "limit": math.inf,
        "timeout": MOST_SECONDS,
        "workers": MOST_PROCESSES,
        "concurrency": math.inf,
    }
    for option, most in bounds.items():
        value = getattr(arguments, option)
        if value is not None and not 0 < value <= most:
            bound = f", at most {most}" if math.isfinite(most) else ""
            raise ConfigError(f"--{option} {value}: expected a number above 0{bound}")
    console = console or Console()
    with naming_options(_OPTIONS):
        scorer = _scorer(arguments)
        values = _Values(arguments, scorer) if isinstance(scorer, Scorer) else None
        samples = list(_samples(arguments, values))
    if not samples:
        raise DataError(f"{arguments.file}: there are no rows in it")
    _require_ready(scorer, Counter(sample.data_source for sample in samples), arguments.timeout)
    by_source: defaultdict[str, list[Outcome]] = defaultdict(list)
    first_error = ""
    pool = RewardPool(
        scorer,
        num_workers=arguments.workers,
        timeout_s=arguments.timeout,
        max_concurrency=arguments.concurrency,
    )
    with contextlib.closing(pool):
        outcomes = pool.evaluate_all(Feed.of(samples))
        progress = track(outcomes, "Scoring", console=console, transient=True, total=len(samples))
        for sample, outcome in zip(samples, progress, strict=True):
            by_source[sample.data_source].append(outcome)
            first_error = first_error or outcome.error
    console.print(_table(by_source))
    if first_error:
        found = in_options(first_error, _OPTIONS)
        console.print(literal(f"The first answer that could not be scored:\n{found}"))
    return 1 if first_error else 0


_OPTIONS = {
    "custom_reward_function.path": "--custom",
    "custom_reward_function.name": "--name",
    "reward_model.timeout_s": "--timeout",
}
"""Key -> the option that sets it, in errors of a user's function."""


def _scorer(arguments: argparse.Namespace) -> ScoreFunction | Scorer:
    """Return the user's function, one scorer for all rows, or the router by data source."""
    if arguments.option and arguments.scorer is None:
        raise ConfigError(
            f"--option {arguments.option[0]}: it is an option of --scorer, which is not given "
            f"(one of {', '.join(SCORERS)})"
        )
    if arguments.scorer is None:
        if arguments.custom is None:
            return Router()
        custom = CustomReward(arguments.custom, arguments.name)
        return Scorer(Function(custom, custom.where))
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


def _require_ready(scorer: ScoreFunction | Scorer, rows: Counter[str], timeout_s: float) -> None:
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


def _samples(arguments: argparse.Namespace, values: _Values | None) -> Iterator[Sample]:
    response, truth = arguments.response_column, arguments.ground_truth_column
    needs_truth = values.needs_truth if values else arguments.scorer not in _WITHOUT_GROUND_TRUTH
    for number, row in enumerate(itertools.islice(iterate(arguments.file), arguments.limit), start=1):
        try:
            response = response or _find_column(row, RESPONSE_COLUMNS, "--response-column")
            if needs_truth:
                truth = truth or _find_column(row, GROUND_TRUTH_COLUMNS, "--ground-truth-column")
            text = value_at(row, response)
            if not isinstance(text, str):
                raise DataError(f"column {response} holds {text!r:.80}: expected a text")
            ground_truth = None if truth is None else value_at(row, truth)
            if truth and not values and (ground_truth is None or ground_truth != ground_truth):
                raise DataError(f"column {truth} holds {ground_truth}: expected the answer")
            sample = Sample(_source(arguments, row), text, ground_truth, row.get("extra_info"))
            yield values.add_to(sample, row) if values else sample
        except KeyError as error:
            raise DataError(
                f"{arguments.file}, row {number}: no column {error}; the columns are {', '.join(row)}"
            ) from None
        except DataError as error:
            raise DataError(f"{arguments.file}, row {number}: {error}") from None


class _Values:
    """Values that a user's function takes by name, from the rows of the file."""

    def __init__(self, arguments: argparse.Namespace, scorer: Scorer) -> None:
        self._arguments, self._scorer = arguments, scorer
        self.needs_truth = bool({"ground_truth", "ground_truths"} & set(scorer.own.required))
        """True for a function that cannot be called without a ground truth."""
        self._tokenizer = None if arguments.tokenizer is None else _load_tokenizer(arguments.tokenizer)
        self._is_checked = False

    def add_to(self, sample: Sample, row: Mapping[str, Any]) -> Sample:
        """Return the sample with the named values of its row, as in training.

        Token ids are those of the columns that strop writes, else the tokenizer's.
        """
        given = row.get(self._arguments.prompt_column)
        if (ids := row.get("response_ids")) is None and self._tokenizer is not None:
            from strop.data.prompts import encode_responses

            (ids,) = encode_responses([sample.solution_str], self._tokenizer)
        prompt = Row(row, given)
        if row.get("prompt_ids") is not None:
            prompt = Row(row, given, ids=lambda: row["prompt_ids"])
        elif self._tokenizer is not None and given is not None:
            prompt = self._tokenized(row, given)
        own = self._scorer
        named = named_values(
            own.wanted, prompt, sample.solution_str, for_batches=own.is_batch, response_ids=ids
        )
        sample = sample._replace(n_tokens=None if ids is None else len(ids), named=named)
        if not self._is_checked:
            self._require(sample, row)
            self._is_checked = True
        return sample

    def _tokenized(self, row: Mapping[str, Any], given: Any) -> Row:
        from strop.data.control_tokens import PromptError
        from strop.data.prompts import encode_prompts

        tokenizer: Any = self._tokenizer

        @functools.cache
        def ids() -> list[int]:
            try:
                return encode_prompts([given], tokenizer)[0]
            except PromptError as error:
                raise DataError(f"column {self._arguments.prompt_column}: {error.reason}") from None

        return Row(row, given, ids=ids, text=lambda: tokenizer.decode(ids(), skip_special_tokens=False))

    def _require(self, sample: Sample, row: Mapping[str, Any]) -> None:
        """Raise ``ConfigError`` if the function needs a value that the rows do not have."""
        function, known = self._scorer.own, values_of(sample)
        function.require(row.keys())
        for name in function.required:
            value = BATCH_NAMES.get(name, name)
            if value in known and not (value == "n_response_tokens" and known[value] is None):
                continue
            remedy = "--tokenizer MODEL"
            if value in ("truncated", "uid"):
                remedy = f"a column {value!r} in the file"
            elif self._arguments.prompt_column not in row and value not in _OF_RESPONSES:
                remedy = f"a column {self._arguments.prompt_column!r}, or --prompt-column NAME"
            raise ConfigError(
                f"{function.where} takes {name!r}, which needs {remedy}; the columns are {', '.join(row)}"
            )


_OF_RESPONSES = ("n_response_tokens", "response_ids")


def _load_tokenizer(path: str) -> Any:
    from strop.models.loader import load_tokenizer  # transformers: seconds

    return load_tokenizer(Path(expand(path)))


def _source(arguments: argparse.Namespace, row: dict[str, Any]) -> str:
    """Return the row's data source; with one scorer for all rows the column is optional."""
    if arguments.data_source:
        return arguments.data_source
    try:
        return str(value_at(row, arguments.data_source_column))
    except KeyError:
        if arguments.scorer is None and arguments.custom is None:
            raise
        return arguments.scorer or UNNAMED_SOURCE


def _table(by_source: Mapping[str, list[Outcome]]) -> Table:
    table = Table("data source", title="Scores", title_justify="left")
    for heading in ("answers", "mean score", "errors"):
        table.add_column(heading, justify="right")
    for source, outcomes in sorted(by_source.items()):
        scores = [outcome.score for outcome in outcomes if not outcome.error and outcome.score is not None]
        mean = f"{sum(scores) / len(scores):.4f}" if scores else "-"
        errors = sum(bool(outcome.error) for outcome in outcomes)
        table.add_row(literal(source), str(len(outcomes)), mean, str(errors))
    return table
