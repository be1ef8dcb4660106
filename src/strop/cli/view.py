"""``strop view RUN_DIR``: show a run's main metrics, validation scores and samples of a step."""

from __future__ import annotations

import argparse
import fnmatch
import math
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from strop.checkpoint.folder import best_step
from strop.cli.options import add_choice_of_iteration
from strop.cli.page import add_web_arguments, serve_page
from strop.columns import REWARD_TEXT
from strop.config.paths import expand
from strop.errors import ConfigError, DataError
from strop.terminal import literal, printable, table
from strop.tracking.jsonl import METRICS_FILE, read_metrics
from strop.tracking.text import (
    REWARD,
    VALIDATION_PREFIX,
    format_number,
    headlines,
    names_in_order,
    shown_names,
    sparkline,
)

COURSE_WIDTH = 10  # the tables fit 80 columns
Steps = Sequence[Mapping[str, Any]]
_SAMPLE_COLUMNS = (
    *("uid", "data_source", "prompt", "response", "ground_truth", "truncated", "score"),
    *("hidden_tokens", "response_with_special_tokens"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dirs",
        metavar="RUN_DIR",
        nargs="+",
        help="the run folder (trainer.default_local_dir); with --web also several, to compare",
    )
    add_web_arguments(parser)
    add_choice_of_iteration(parser)
    parser.add_argument(
        "--samples", type=int, default=5, metavar="K", help="number of samples shown; 0 for none (5)"
    )
    parser.add_argument("--prompt", metavar="TEXT", help="show samples whose prompt contains this text")
    parser.add_argument("--text", metavar="TEXT", help="show samples whose response contains this text")
    parser.add_argument(
        "--uid", help="show the samples of the prompt with this uid; without it, one sample of each prompt"
    )
    parser.add_argument(
        "--sort",
        choices=("score", "length"),
        help="show samples with the lowest score or greatest length first",
    )
    parser.add_argument(
        "--validation",
        action="store_true",
        help="show validation samples instead of training samples (--best does)",
    )
    parser.add_argument(
        "--metrics",
        type=lambda names: names.split(","),
        metavar="NAME,...",
        help="show these metrics instead of the main ones; * matches anything",
    )


def run(args: argparse.Namespace) -> int:
    """Show the run; DataError when the folder is not a run folder or has no such step."""
    if args.web:
        token = None if args.no_token else secrets.token_hex(16)
        return serve_page(args.run_dirs, host=args.host, port=args.port, token=token)
    if len(args.run_dirs) > 1:
        raise ConfigError(f"{len(args.run_dirs)} runs were given; several are compared with --web")
    run_dir = Path(expand(args.run_dirs[0]))
    steps = read_metrics(run_dir / METRICS_FILE)
    if not steps:
        raise DataError(f"{run_dir / METRICS_FILE}: no step has been logged yet")
    logged, chosen = {step["step"]: step for step in steps}, args.step
    if args.best and (chosen := best_step(run_dir, logged)) is None:
        raise DataError(f"{run_dir}: no iteration was validated (trainer.test_freq)")
    from strop.page.files import RunFiles  # pyarrow

    shown: list[RenderableType] = [
        literal(RunFiles(run_dir).state()["text"]),
        _metrics_table(run_dir, steps, args.metrics, logged.get(chosen)),
    ]
    if any(name.startswith(VALIDATION_PREFIX) for name in names_in_order(steps)):
        shown.append(_validation_table(steps))
    from strop.tracking.samples import find_step, step_file, steps_with_file

    folder = run_dir / ("validation" if args.validation or args.best else "rollouts")
    if not steps_with_file(folder) and chosen in logged:  # a run that generates nothing
        chosen = None
    step = find_step(folder, chosen) if args.samples > 0 or chosen not in logged else None
    if args.samples > 0 and step is not None:
        wanted = _Wanted(args.prompt, args.text, args.uid)
        path = step_file(folder, step)
        shown.append(_samples_view(step, path, wanted, count=args.samples, sort=args.sort))
    Console().print(*shown, sep="\n")  # last, so that a mistake in the arguments prints its error only
    return 0


def _metrics_table(
    run_dir: Path, steps: Steps, wanted: Sequence[str] | None, chosen: Mapping[str, Any] | None
) -> Table:
    """Return a table of metrics at the first, the ``chosen`` or the best rewarded, and the last step."""
    trained = [step for step in steps if REWARD in step] or list(steps)
    best = max(trained, key=lambda step: _nan_as_worst(step.get(REWARD, math.nan)))
    shown = {"first": trained[0], "best reward": best, "last": trained[-1]}
    if chosen is not None:
        shown = {"first": trained[0], "chosen": chosen, "last": trained[-1]}
    elif REWARD not in best:  # fine-tuning, preferences
        del shown["best reward"]
    rows = []
    for name in _names_to_show(steps, wanted):
        course = sparkline([step[name] for step in steps if name in step], width=COURSE_WIDTH)
        rows.append((name, *(format_number(step.get(name)) for step in shown.values()), course))
    labels = [f"{label}\nstep {step['step']}" for label, step in shown.items()]
    return table(run_dir, ["metric", *labels, "course"], rows, align="l" + "r" * len(labels) + "l")


def _nan_as_worst(score: float) -> float:
    return -math.inf if math.isnan(score) else score


def _names_to_show(steps: Steps, wanted: Sequence[str] | None) -> list[str]:
    """Return the metrics to show, equal ones once; DataError when a pattern in ``wanted`` matches nothing."""
    names = shown_names(steps)
    if wanted is None:
        return [headline.metric for headline in headlines(steps)] or list(dict.fromkeys(names.values()))
    found: dict[str, str] = {}
    for pattern in wanted:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            raise DataError(f"--metrics {pattern}: the run logged no such metric; it has {', '.join(names)}")
        for name in matching:
            found.setdefault(name if name == pattern else names[name], name)
    return list(dict.fromkeys(found.values()))


def _validation_table(steps: Steps) -> Table:
    rows = []
    for name in names_in_order(steps):
        if not name.startswith(VALIDATION_PREFIX):
            continue
        points = [(step["step"], step[name]) for step in steps if name in step]
        best_step, best = max(points, key=lambda point: _nan_as_worst(point[1]))
        scores = [score for _, score in points]
        figures = format_number(scores[0]), format_number(best), best_step, format_number(scores[-1])
        rows.append((name.removeprefix(VALIDATION_PREFIX), *figures, sparkline(scores, width=COURSE_WIDTH)))
    headings = ("data source", "first", "best", "at step", "last", "course")
    return table("Validation", headings, rows, align="lrrrrl")


class _Wanted(NamedTuple):
    """Choice of samples: parts of the prompt and of the response, and the prompt's uid; None: any."""

    prompt: str | None
    text: str | None
    uid: str | None

    def __str__(self) -> str:
        given = [f"--{name} {value}" for name, value in self._asdict().items() if value is not None]
        return " ".join(given)

    def selects(self, sample: Mapping[str, Any]) -> bool:
        """Return True for a sample that has all of it."""
        responses = [sample.get(name) or "" for name in ("response", "response_with_special_tokens")]
        return (
            (self.prompt is None or self.prompt in (sample.get("prompt") or ""))
            and (self.text is None or any(self.text in response for response in responses))
            and (self.uid is None or self.uid == str(sample.get("uid")))
        )


def _one_of_each_prompt(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first sample of each uid; samples without one count as a prompt each."""
    first: dict[Any, dict[str, Any]] = {}
    for number, sample in enumerate(samples):
        first.setdefault(sample.get("uid") or number, sample)
    return list(first.values())


def _samples_view(step: int, path: Path, wanted: _Wanted, *, count: int, sort: str | None) -> Group:
    """Return the first ``count`` samples of those wanted, after sorting, each in a frame."""
    everything = _read_samples(path)
    samples = [sample for sample in everything if wanted.selects(sample)]
    if not samples:
        uids = list(dict.fromkeys(str(sample.get("uid")) for sample in everything))
        hint = f"; its uids are {', '.join(uids[:5])}{', ...' if len(uids) > 5 else ''}" if wanted.uid else ""
        raise DataError(f"{wanted}: none of the {len(everything)} samples of step {step} ({path}){hint}")
    found = len(samples)
    if sort == "score":
        samples.sort(key=lambda sample: sample.get("score", 0.0))
    elif sort == "length":
        samples.sort(key=lambda sample: -sample["length"])
    if wanted.uid is None:
        samples = _one_of_each_prompt(samples)
    each = ", one of each prompt" if len(samples) < found else ""
    given = f" with {wanted}" if str(wanted) else ""
    shown = f"{min(count, len(samples))} of {found}{given}{each}"
    title = literal(f"Samples of step {step}: {shown} ({path})", style="bold")
    return Group(title, *(_sample_panel(sample) for sample in samples[:count]))


def _read_samples(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    from strop.tracking.samples import reading_samples

    with reading_samples(path):
        names = pq.read_schema(path).names
        columns = [
            name for name in names if name in _SAMPLE_COLUMNS or name.startswith(("reward/", REWARD_TEXT))
        ]
        own = "response_length" if "response_length" in names else "response_ids"  # of earlier versions
        table = pq.read_table(path, columns=[*columns, own])
    found = table[own].combine_chunks()
    lengths = found if own == "response_length" else found.value_lengths()
    return table.drop_columns(own).append_column("length", lengths).to_pylist()


def _sample_panel(sample: Mapping[str, Any]) -> Panel:
    score = sample.get("score")
    parts = {
        name: value for name, value in sample.items() if name.startswith("reward/") and value is not None
    }
    facts = [f"{sample['length']} tokens" + (", cut at the limit" if sample.get("truncated") else "")]
    facts += [f"{name.removeprefix('reward/')} {format_number(value)}" for name, value in parts.items()]
    if sample.get("hidden_tokens"):
        facts.append(f"{sample['hidden_tokens']} hidden from the reward")
    body = Text()
    body.append(printable(sample.get("prompt") or "") + "\n", style="dim")
    response = sample.get("response_with_special_tokens") or sample.get("response") or ""
    body.append(printable(response), style="bold")
    if sample.get("ground_truth") is not None:
        body.append(f"\nground truth: {printable(sample['ground_truth'])}", style="green")
    for name, text in sample.items():
        if name.startswith(REWARD_TEXT) and text is not None:
            body.append(f"\n{name.removeprefix(REWARD_TEXT)}: {printable(text)}")
    title = literal(f"{sample.get('uid', '')}  score {format_number(score)}  ({', '.join(facts)})")
    return Panel(body, title=title, title_align="left", box=box.ROUNDED, border_style="dim")
