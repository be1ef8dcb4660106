"""The command ``strop``: what a command needs is imported when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence

from strop.cli.run import run_command

Run = Callable[[argparse.Namespace], int]


def _train(arguments: argparse.Namespace) -> int:
    from strop.cli import train

    return train.run(train.config_from(arguments))


def _sft(arguments: argparse.Namespace) -> int:
    return importlib.import_module("strop.cli.train").run_sft(arguments)


def _train_rm(arguments: argparse.Namespace) -> int:
    return importlib.import_module("strop.cli.train").run_train_rm(arguments)


def _check(arguments: argparse.Namespace) -> int:
    from strop.cli.check import data_problems, option_problems, show_check
    from strop.cli.train import loaded_from
    from strop.config.trees import PPO
    from strop.data.parquet import count_rows

    return show_check(
        loaded_from(arguments, PPO),
        train_rows=count_rows,
        more_problems=lambda config: [*option_problems(config), *data_problems(config)],
    )


def _eval(arguments: argparse.Namespace) -> int:
    return importlib.import_module("strop.cli.evaluate").run(arguments)


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


def _score(arguments: argparse.Namespace) -> int:
    return importlib.import_module("strop.cli.score").run(arguments)


def _view(arguments: argparse.Namespace) -> int:
    return importlib.import_module("strop.cli.view").run(arguments)


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="a global_step_N folder, or the URL of one")
    parser.add_argument("--out", required=True, help="the Hugging Face folder to write; must not exist")
    parser.add_argument(
        "--role", default="actor", choices=("actor", "critic", "reward_model"), help="whose model (actor)"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="of the weights (as they were saved)"
    )


_COMMANDS: dict[str, tuple[str, str, Run]] = {
    "train": ("train a model", "strop.cli.train:add_config_arguments", _train),
    "sft": ("fine-tune a model on responses", "strop.cli.train:add_config_arguments", _sft),
    "train-rm": (
        "train a reward model on pairs of answers",
        "strop.cli.train:add_config_arguments",
        _train_rm,
    ),
    "check": (
        "check a configuration without loading a model",
        "strop.cli.train:add_config_arguments",
        _check,
    ),
    "eval": (
        "answer the prompts of a data set with a model, and score the answers",
        "strop.cli.evaluate:add_arguments",
        _eval,
    ),
    "prepare": (
        "turn a data set into parquet files",
        "strop.cli.prepare:add_arguments",
        _prepare,
    ),
    "score": ("score a file of answers", "strop.cli.score:add_arguments", _score),
    "export": ("turn a checkpoint into a Hugging Face folder", "strop.cli.main:_export_arguments", _export),
    "view": ("look at a run", "strop.cli.view:add_arguments", _view),
}
_THAT_TRAIN = ("train", "sft", "train-rm")


def _overview() -> argparse.ArgumentParser:
    """What ``strop --help`` shows; the arguments of a command are its own parser's."""
    parser = argparse.ArgumentParser(
        prog="strop", description="Sharpen language models with reinforcement learning."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (summary, _arguments, _run) in _COMMANDS.items():
        commands.add_parser(name, help=summary)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] not in _COMMANDS:
        _overview().parse_args(argv)
        return 2
    sys.path.insert(0, "")  # a user's own modules, named by import path, lie where the command is run
    summary, add_arguments, run = _COMMANDS[argv[0]]
    parser = argparse.ArgumentParser(prog=f"strop {argv[0]}", description=f"{summary.capitalize()}.")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    module, _, function = add_arguments.partition(":")
    getattr(importlib.import_module(module), function)(parser)
    arguments = parser.parse_intermixed_args(argv[1:])
    return run_command(
        lambda: run(arguments), debug=arguments.debug, makes_checkpoints=argv[0] in _THAT_TRAIN
    )
