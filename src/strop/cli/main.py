"""The command ``strop``; the modules of a command are imported when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

from strop.cli.run import run_command
from strop.config.backends import load_backend
from strop.terminal import print_exception


def _prepare(arguments: argparse.Namespace) -> int:
    from strop.cli.prepare import prepare_from_arguments

    for split, (path, rows) in prepare_from_arguments(arguments).items():
        print(f"{split}: {rows} rows in {path}")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from strop.checkpoint.export import export

    out = export(arguments.checkpoint, arguments.out, role=arguments.role, dtype=arguments.dtype)
    print(f"model in {out}")
    return 0


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="a global_step_N folder, or the URL of one")
    parser.add_argument("--out", required=True, help="the Hugging Face folder to write; must not exist")
    parser.add_argument(
        "--role",
        default="actor",
        choices=("actor", "critic", "reward_model"),
        help="role of the model (actor)",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="dtype of the weights (default: as saved)"
    )


class _Command(NamedTuple):
    """A command; functions are named "module:function" and imported when the command runs."""

    summary: str
    add_arguments: str
    run: str


_CONFIG = "strop.cli.train:add_config_arguments"
_COMMANDS = {
    "train": _Command("train a model", _CONFIG, "strop.cli.train:run_train"),
    "sft": _Command("fine-tune a model on responses", _CONFIG, "strop.cli.train:run_sft"),
    "train-rm": _Command("train a reward model on pairs of answers", _CONFIG, "strop.cli.train:run_train_rm"),
    "check": _Command(
        "check a configuration and the data that it names, without loading a model",
        "strop.cli.check:add_arguments",
        "strop.cli.check:run",
    ),
    "eval": _Command(
        "answer the prompts of a data set with a model, and score the answers",
        "strop.cli.evaluate:add_arguments",
        "strop.cli.evaluate:run",
    ),
    "prepare": _Command(
        "turn a data set into parquet files", "strop.cli.prepare:add_arguments", "strop.cli.main:_prepare"
    ),
    "score": _Command("score a file of answers", "strop.cli.score:add_arguments", "strop.cli.score:run"),
    "export": _Command(
        "turn a checkpoint into a Hugging Face folder",
        "strop.cli.main:_export_arguments",
        "strop.cli.main:_export",
    ),
    "view": _Command(
        "show metrics and samples of a run", "strop.cli.view:add_arguments", "strop.cli.view:run"
    ),
    "report": _Command(
        "write the page of one or several runs as one HTML file",
        "strop.cli.page:add_arguments",
        "strop.cli.page:run",
    ),
}


def _overview() -> argparse.ArgumentParser:
    """Return the parser behind ``strop --help``; each command has its own for its arguments."""
    parser = argparse.ArgumentParser(
        prog="strop", description="Train language models with reinforcement learning."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        commands.add_parser(name, help=command.summary)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    if argv is None:  # the whole process is the command's
        sys.excepthook = print_exception
        argv = sys.argv[1:]
    if not argv or argv[0] not in _COMMANDS:
        _overview().parse_args(argv)
        return 2
    sys.path.insert(0, "")  # users' modules, named by import path, are in the current folder
    command = _COMMANDS[argv[0]]
    parser = argparse.ArgumentParser(
        prog=f"strop {argv[0]}", description=f"{command.summary[0].upper()}{command.summary[1:]}."
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    load_backend(command.add_arguments)(parser)
    arguments = parser.parse_intermixed_args(argv[1:])
    return run_command(lambda: load_backend(command.run)(arguments), debug=arguments.debug)
