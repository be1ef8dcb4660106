"""The arguments of ``strop prepare``."""

from __future__ import annotations

import argparse

from strop.prepare import DATASETS, prepare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add data set, source, target and every data set's options to ``parser``."""
    parser.add_argument("dataset", choices=sorted(DATASETS), help="which data set to prepare")
    parser.add_argument(
        "--source",
        help="a file or folder of parquet, JSONL (also .gz), JSON or CSV, an fsspec URL, a folder of "
        "`save_to_disk`, or a hub name for the package `datasets`; default: the data set's own hub name",
    )
    parser.add_argument("--out", required=True, help="folder for <split>.parquet")
    parser.argument_default = argparse.SUPPRESS  # each data set has its own defaults
    add = parser.add_argument_group("all but arithmetic").add_argument
    add("--cache-dir", help="folder for downloads (default: ~/.cache/strop)")
    add = parser.add_argument_group("gsm8k, math, hellaswag, humaneval, mbpp, table").add_argument
    add("--instruction", help="the sentence that asks for the form of an answer")
    add = parser.add_argument_group("table: rows of your own").add_argument
    add("--prompt", metavar="COLUMN", help="the prompt, a text or chat messages; a.b: field b of a (prompt)")
    add("--answer", metavar="COLUMN", help="the right answer, which becomes the ground truth (answer)")
    add("--data-source", metavar="NAME", help="what selects the scorer (the column data_source, if any)")
    add = parser.add_argument_group("full_hh_rlhf").add_argument
    add("--split-kind", help="kind of training that reads the files: sft, rm or rl (rl)")
    add = parser.add_argument_group("arithmetic").add_argument
    add("--min-operand", type=int, help="smallest operand (0)")
    add("--max-operand", type=int, help="largest operand (9)")
    add("--held-out", type=float, help="test pairs: a fraction below 1 or a count (0.2)")
    add("--train-size", type=int, help="training pairs (all that are not held out)")
    add("--question", help="the question, with {a} and {b} ({a}+{b}=)")
    add("--seed", type=int, help="seed of the choice and the order (1)")


def run(arguments: argparse.Namespace) -> int:
    """Prepare the data set and return 0; ``DataError`` for an option of another data set."""
    own = ("dataset", "source", "out", "debug")
    options = {name: value for name, value in vars(arguments).items() if name not in own}
    for split, (path, rows) in prepare(arguments.dataset, arguments.source, arguments.out, **options).items():
        print(f"{split}: {rows} rows in {path}")
    return 0
