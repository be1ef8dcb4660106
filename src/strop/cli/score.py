"""``strop score FILE``: score every answer in a file, with a summary by data source."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from strop.cli.options import OneReward, in_options, naming_function, naming_options
from strop.config.reward_parts import SCORERS
from strop.config.schema.base import MOST_PROCESSES, MOST_SECONDS
from strop.data.prompt_table import RESPONSE_COLUMNS, source_of, with_texts
from strop.data.records import CHUNK_ROWS, to_rows
from strop.data.sources import read_table, require_readable, value_at
from strop.errors import ConfigError, DataError, RewardError
from strop.rewards.arguments import (
    BATCH_NAMES,
    Function,
    Row,
    Sample,
    ScoreFunction,
    named_values,
    tail_of,
    values_of,
)
from strop.rewards.custom import CustomReward
from strop.rewards.router import BuiltInScorer, Router
from strop.rewards.scorer import Outcome, Scorer
from strop.rewards.worker.pool import Feed, RewardPool
from strop.terminal import literal, table
from strop.trainer.evaluation import reward_keys

PREPARED_TRUTH = "reward_model.ground_truth"
GROUND_TRUTH_COLUMNS = (PREPARED_TRUTH, "ground_truth")
_MAY_BE_TRUTHS = ("completion", "output", "solution", "answer")
_WITHOUT_GROUND_TRUTH = ("format", "length")


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
        help="an option of --scorer, as in method=flexible; repeatable (strop docs data lists them)",
    )
    names = "--reward", "--custom-reward", "--custom"
    what = "your own function, for all rows"
    add(*names, action=OneReward, dest="custom", metavar="FILE[:NAME]", help=what)
    add("--name", default="compute_score", help=argparse.SUPPRESS)  # the name without a colon
    add(
        "--prompt-column",
        default="prompt",
        help="the prompt, a text or chat messages, for a --reward function (prompt)",
    )
    add(
        "--tokenizer",
        metavar="MODEL",
        help="a Hugging Face folder or name, for a --reward function that takes tokens or the text of a chat",
    )
    add("--limit", type=int, help="score only the first rows")
    add("--timeout", type=float, default=10.0, help="time limit for one answer in seconds (10)")
    add("--workers", type=int, default=1, help="scoring processes (1)")
    add(
        "--concurrency",
        type=int,
        default=32,
        help="answers that an async --reward function scores at the same time, in one process (32)",
    )


def run(arguments: argparse.Namespace, console: Console | None = None) -> int:
    """Score the file and print the table; return 1 if answers could not be scored, else 0.

    All rows are read, and every data source checked, before the first answer is scored.
    """
    bounds = {"limit": None, "timeout": MOST_SECONDS, "workers": MOST_PROCESSES, "concurrency": None}
    for option, most in bounds.items():
        value = getattr(arguments, option)
        if value is not None and not 0 < value <= (most or math.inf):
            bound = f", at most {most}" if most else ""
            raise ConfigError(f"--{option} {value}: expected a number above 0{bound}")
    console = console or Console()
    options = _OPTIONS | naming_function(arguments.custom or "")
    with naming_options(options):
        scorer = _scorer(arguments)
        rows = _Rows(arguments, scorer)
        samples = list(rows.samples())
    if not samples:
        raise DataError(f"{arguments.file}: there are no rows in it")
    console.print(literal(rows.columns_in_words()), soft_wrap=True)
    _require_ready(scorer, Counter(sample.data_source for sample in samples), arguments.timeout)
    pool = RewardPool(
        scorer,
        num_workers=arguments.workers,
        timeout_s=arguments.timeout,
        max_concurrency=arguments.concurrency,
    )
    with contextlib.closing(pool):
        found = pool.evaluate_all(Feed.of(samples))
        outcomes = list(track(found, "Scoring", console=console, transient=True, total=len(samples)))
    console.print(_scores(samples, outcomes))
    if errors := [outcome.error for outcome in outcomes if outcome.error]:
        first = in_options(errors[0], options)
        console.print(literal(f"The first answer that could not be scored:\n{first}"))
    return 1 if errors else 0


_OPTIONS = {
    "custom_reward_function.path": "--reward",
    "model.path": "--tokenizer",
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
        keys = reward_keys(arguments.custom)
        path, name = (keys.get(f"custom_reward_function.{key}") for key in ("path", "name"))
        custom = CustomReward(path or arguments.custom, name or arguments.name)
        return Scorer(Function(custom, custom.where))
    if arguments.custom is not None:
        raise ConfigError("--reward and --scorer: each scores all rows; leave one out")
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
    checks: list[Callable[[float], None]] = []
    if isinstance(scorer, BuiltInScorer):
        checks = [scorer.require_ready]
    elif isinstance(scorer, Router):
        if unknown := sorted(rows.keys() - set(scorer.sources)):
            raise RewardError(
                f"no scorer for data_source {unknown[0]!r} of {rows[unknown[0]]} rows: score all rows with "
                f"--reward FILE or --scorer NAME ({', '.join(SCORERS)}); known: {', '.join(scorer.sources)}"
            )
        checks = [functools.partial(scorer.require_ready, source) for source in rows]
    with naming_options(_OPTIONS):
        for check in checks:
            check(timeout_s)


class _Rows:
    """The rows of the file as samples, with the named values that a user's function takes, as in training.

    Columns that no option names are those of the first row. Numbers in those of prompt, response and ground
    truth are text, as in training in the columns that keys name; a user's function gets the numbers of a
    ground truth that no option names, as in training. Token ids are those of the columns that strop writes,
    else the tokenizer's.
    """

    def __init__(self, arguments: argparse.Namespace, scorer: ScoreFunction | Scorer) -> None:
        self._arguments = arguments
        self._response, self._truth = arguments.response_column, arguments.ground_truth_column
        self._is_named = arguments.response_column is not None
        self._custom = scorer if isinstance(scorer, Scorer) else None
        self._valued = Scorer.of(scorer)
        self._needs_truth = arguments.scorer not in _WITHOUT_GROUND_TRUTH
        if self._custom is not None:
            self._needs_truth = bool({"ground_truth", "ground_truths"} & set(self._custom.own.required))
        self._tokenizer: Any = None
        if arguments.tokenizer is not None:
            from strop.data.hub import local_tokenizer
            from strop.models.folder import load_tokenizer  # transformers: seconds

            self._tokenizer = load_tokenizer(local_tokenizer(arguments.tokenizer))
        self._is_checked = False

    def samples(self) -> Iterator[Sample]:
        """Yield a sample for each row. Raises ``DataError`` with the number of a row that is not usable.

        At the end it is raised for a column that may be one of right answers, that no option names and that
        is the ground truth of every row: files of ``strop prepare table`` keep theirs.
        """
        row, is_truth, rows = {}, True, enumerate(self._rows())
        for number, row in itertools.islice(rows, self._arguments.limit):
            with self._located(number, row):
                sample = self._sample(row)
            is_truth = is_truth and sample.solution_str == _prepared_truth(row)
            yield sample
        if not row or not is_truth or self._is_named or self._response not in _MAY_BE_TRUTHS:
            return
        if all(value_at(row, self._response) == _prepared_truth(row) for _, row in rows):  # beyond --limit
            raise DataError(
                f"{self._arguments.file}: the column {self._response} equals {PREPARED_TRUTH} in every row, "
                "so it may hold the right answers: name the column of the model's answers with "
                f"--response-column ({self._response}, if it has them); the columns are {', '.join(row)}"
            )

    def columns_in_words(self) -> str:
        """Return a line on the columns that are scored, after ``samples``."""
        truth = f"; ground truth: column {self._truth}" if self._truth else ""
        return f"Responses: column {self._response}{truth}"

    def _rows(self) -> Iterator[dict[str, Any]]:
        """Choose the columns, and yield the rows with these as text."""
        file, texts = self._arguments.file, {self._arguments.prompt_column}
        texts |= {self._response, self._truth} - {None}
        data = read_table(file, texts=texts)
        require_readable(file, data)
        if not len(data):
            return
        (first,) = to_rows(data.slice(0, 1))
        with self._located(0, first):
            self._choose(first)
        # not the ground truth of a user's function, whose numbers training keeps where no key names it
        scored = {self._response, None if self._custom else self._truth}
        found = {column for column in scored if column in first} - texts
        if not all(isinstance(first[column], str) for column in found):
            data = read_table(file, texts=texts | found)  # of CSV the text of the file, 1.50 and not 1.5
        data = with_texts(data, texts | found)
        for start in range(0, len(data), CHUNK_ROWS):
            yield from to_rows(data.slice(start, CHUNK_ROWS))

    def _choose(self, row: dict[str, Any]) -> None:
        """Set the columns of response and ground truth by ``row`` where no option names them."""
        if not self._is_named:
            free = [column for column in RESPONSE_COLUMNS if column != self._truth]
            self._response = _first(row, free, "--response-column")
        if self._needs_truth:
            self._truth = self._truth or _first(row, GROUND_TRUTH_COLUMNS, "--ground-truth-column")

    @contextlib.contextmanager
    def _located(self, number: int, row: Mapping[str, Any]) -> Generator[None]:
        """Name file and row in errors of the body."""
        try:
            yield
        except (KeyError, DataError) as error:
            why = f"no column {error}; the columns are {', '.join(row)}"
            raise DataError(
                f"{self._arguments.file}, row {number}: {error if isinstance(error, DataError) else why}"
            ) from None

    def _sample(self, row: dict[str, Any]) -> Sample:
        text = value_at(row, self._response)
        if not isinstance(text, str):
            raise DataError(f"column {self._response} holds {text!r:.80}: expected a text")
        truth = None if self._truth is None else value_at(row, self._truth)
        if self._truth and self._custom is None and (truth is None or truth != truth or truth == ""):
            raise DataError(f"column {self._truth} holds null, NaN or an empty text: expected the answer")
        sample = Sample(self._source(row), text, truth, row.get("extra_info"))
        return self._with_values(self._valued, sample, row)

    def _source(self, row: dict[str, Any]) -> str:
        """Return the row's data source; with one scorer for all rows the column is optional."""
        given = self._arguments
        if given.data_source:
            return given.data_source
        try:
            return str(value_at(row, given.data_source_column))
        except KeyError:
            if given.scorer is None and given.custom is None:
                raise
            return given.scorer or source_of(given.file)

    def _with_values(self, custom: Scorer, sample: Sample, row: Mapping[str, Any]) -> Sample:
        if (response_ids := row.get("response_ids")) is None and self._tokenizer is not None:
            from strop.data.prompts import encode_responses

            (response_ids,) = encode_responses([sample.solution_str], self._tokenizer)
        if "images" in custom.wanted and (images := row.get("images")):
            raise ConfigError(
                f"{custom.own.where} takes images, pictures of PIL in a run, and strop score reads none: the "
                f"column has {images!s:.60}. Take no images here, or score new answers with strop eval"
            )
        values = named_values(
            custom.wanted,
            self._prompt(row),
            sample.solution_str,
            takes_all=custom.takes_all,
            for_batches=custom.is_batch,
            response_ids=response_ids,
        )
        n_tokens = None if response_ids is None else len(response_ids)
        sample = sample._replace(n_tokens=n_tokens, named=values)
        if not self._is_checked:
            self._is_checked = True
            custom.own.require(row.keys())
            self._require(custom.own, values_of(sample), row)
        return sample

    def _prompt(self, row: Mapping[str, Any]) -> Row:
        from strop.data.prompts import chat_of_text, tools_of

        given, tokenizer = row.get(self._arguments.prompt_column), self._tokenizer
        given = (chat_of_text(given) if isinstance(given, str) else None) or given
        if row.get("prompt_ids") is not None:
            tail = None if tokenizer is None else lambda: tail_of(row["prompt_ids"], tokenizer)
            return Row(row, given, ids=lambda: row["prompt_ids"], tail=tail)
        if tokenizer is None or given is None:
            return Row(row, given)
        from strop.data.control_tokens import PromptError
        from strop.data.prompts import encode_prompts

        @functools.cache
        def ids() -> list[int]:
            try:
                tools = tools_of(row.get("tools"))
                return encode_prompts([given], tokenizer, tools=[json.dumps(tools) if tools else None])[0]
            except PromptError as error:
                raise DataError(f"column {self._arguments.prompt_column}: {error.reason}") from None
            except ValueError as error:
                raise DataError(f"column tools: {error}") from None

        return Row(
            row,
            given,
            ids=ids,
            text=lambda: tokenizer.decode(ids(), skip_special_tokens=False),
            tail=lambda: tail_of(ids(), tokenizer),
        )

    @staticmethod
    def _require(function: Function, known: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        """Raise ``ConfigError`` if the function needs a value that the rows do not have."""
        for name in function.required:
            value = BATCH_NAMES.get(name, name)
            if value not in known or (value == "n_response_tokens" and known[value] is None):
                raise ConfigError(
                    f"{function.where} takes {name!r}, which needs a column {value!r} in the file, or for "
                    "prompts and tokens --prompt-column NAME and --tokenizer MODEL; the columns are "
                    f"{', '.join(row)}"
                )


def _prepared_truth(row: Mapping[str, Any]) -> str | None:
    """Return the ground truth of a row for ``strop train`` as text; None without one."""
    with contextlib.suppress(KeyError):
        return str(value_at(row, PREPARED_TRUTH))
    return None


def _first(row: Mapping[str, Any], candidates: Iterable[str], option: str) -> str:
    """Return the first candidate that the row has; ``DataError`` names the option that chooses another."""
    for column in candidates:
        with contextlib.suppress(KeyError):
            value_at(row, column)
            return column
    raise DataError(
        f"no column {' or '.join(candidates)}; the columns are {', '.join(row)}. Choose one with {option} "
        "(a dot reaches into nested columns)"
    )


def _scores(samples: Iterable[Sample], outcomes: Sequence[Outcome]) -> Table:
    """Return the table of answers, mean score and errors by data source."""
    by_source: defaultdict[str, list[Outcome]] = defaultdict(list)
    for sample, outcome in zip(samples, outcomes, strict=True):
        by_source[sample.data_source].append(outcome)
    rows = []
    for source, found in sorted(by_source.items()):
        scores = [outcome.score for outcome in found if not outcome.error and outcome.score is not None]
        mean = f"{sum(scores) / len(scores):.4f}" if scores else "-"
        rows.append((source, len(found), mean, sum(bool(outcome.error) for outcome in found)))
    left_out = sum(not outcome.error and outcome.score is None for outcome in outcomes)
    title = f"Scores ({left_out} answers left out: no scorer can judge them)" if left_out else "Scores"
    return table(title, ("data source", "answers", "mean score", "errors"), rows)
