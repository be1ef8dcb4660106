"""The arguments of ``strop prepare``."""

from __future__ import annotations

import argparse

from strop.prepare import DATASETS, Prepared, prepare

_GIVEN_ONLY = argparse.SUPPRESS  # options left out are not passed on: each data set has its own defaults


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add data set, source, target and every data set's options to ``parser``."""
    parser.add_argument("dataset", choices=sorted(DATASETS), help="which data set to prepare")
    parser.add_argument(
        "--source",
        help="a file or folder of JSONL (also .gz) or parquet, an fsspec URL, or a hub name for the package "
        "`datasets`; default: the data set's own hub name",
    )
    parser.add_argument("--out", required=True, help="folder for <split>.parquet")
    add = parser.add_argument_group("all but arithmetic").add_argument
    add("--cache-dir", default=_GIVEN_ONLY, help="folder for downloads (default: ~/.cache/strop)")
    add = parser.add_argument_group("gsm8k, math, hellaswag, humaneval, mbpp").add_argument
    add(
        "--instruction",
        default=_GIVEN_ONLY,
        help="the sentence that asks for the form of an answer",
    )
    add = parser.add_argument_group("full_hh_rlhf").add_argument
    add("--split-kind", default=_GIVEN_ONLY, help="kind of training that reads the files: sft, rm or rl (rl)")
    add = parser.add_argument_group("arithmetic").add_argument
    add("--min-operand", type=int, default=_GIVEN_ONLY, help="smallest operand (0)")
    add("--max-operand", type=int, default=_GIVEN_ONLY, help="largest operand (9)")
    add("--held-out", type=float, default=_GIVEN_ONLY, help="test pairs: a fraction below 1 or a count (0.2)")
    add("--train-size", type=int, default=_GIVEN_ONLY, help="training pairs (all that are not held out)")
    add("--question", default=_GIVEN_ONLY, help="the question, with {a} and {b} ({a}+{b}=)")
    add("--seed", type=int, default=_GIVEN_ONLY, help="seed of the choice and the order (1)")


_OPTIONS = (
    "instruction",
    "cache_dir",
    "split_kind",
    "min_operand",
    "max_operand",
    "held_out",
    "train_size",
    "seed",
    "question",
)


def prepare_from_arguments(arguments: argparse.Namespace) -> dict[str, Prepared]:
    """Prepare the data set; an option of another data set raises :class:`DataError`."""
    options = {name: getattr(arguments, name) for name in _OPTIONS if hasattr(arguments, name)}
    return prepare(arguments.dataset, arguments.source, arguments.out, **options)
