"""The command ``strop``; the modules of a command are imported when it runs."""

from __future__ import annotations

import argparse
import gc
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import NamedTuple

from strop.cli.run import run_command
from strop.config.backends import load_backend
from strop.terminal import print_exception
from strop.version import __version__


class _Command(NamedTuple):
    """A command; functions are named "module:function" and imported when the command runs."""

    summary: str
    add_arguments: str
    run: str
    examples: str


_TREE = ("strop.cli.train:add_config_arguments", "strop.cli.train:run")
_COMMANDS = {
    "train": _Command(
        "train a model",
        "strop.cli.train:add_train_arguments",
        "strop.cli.train:run",
        """\
strop train MODEL sums.csv --reward my_reward.py data.prompt_key=question data.answer_key=answer
strop train MODEL gsm8k/train.parquet --out runs/first data.val_files=gsm8k/test.parquet trainer.test_freq=20
strop train MODEL gsm8k/train.parquet --lr 1e-5 --algorithm ppo --steps 100
strop train --config my.yaml --out runs/second
Without MODEL, DATA and recipe the defaults are near those of verl: strop train key=value ...
The same command again resumes from the last checkpoint. Keys: strop docs config""",
    ),
    "distill": _Command(
        "train a student on a teacher's judgement of its own answers",
        "strop.cli.train:add_distill_arguments",
        "strop.cli.train:run",
        """\
strop distill STUDENT TEACHER prompts.parquet --lr 1e-5 --out runs/student
strop distill STUDENT TEACHER prompts.parquet teacher.kl=js teacher.top_k=64
strop distill STUDENT TEACHER sums.csv --reward my_reward.py teacher.coef=0.1
Keys: strop docs distillation, and those of strop train""",
    ),
    "sft": _Command(
        "fine-tune a model on responses",
        *_TREE,
        """\
strop sft MODEL answers.csv data.prompt_key=question data.response_key=answer
strop sft MODEL answers.parquet --lr 1e-5 --out runs/sft trainer.total_epochs=2
Keys: strop docs supervised_config""",
    ),
    "train-rm": _Command(
        "train a reward model on pairs of answers",
        *_TREE,
        """\
strop train-rm MODEL pairs.parquet data.val_files=held_out.parquet
Keys: strop docs supervised_config""",
    ),
    "dpo": _Command(
        "train a model on preferred and rejected answers (DPO, IPO, SimPO, ORPO and others)",
        *_TREE,
        """\
strop dpo MODEL pairs.parquet data.val_files=held_out.parquet
strop dpo MODEL pairs.parquet --lr 1e-6 update.loss=simpo
Keys: strop docs supervised_config""",
    ),
    "check": _Command(
        "check a configuration and the data that it names, without loading a model",
        "strop.cli.check:add_arguments",
        "strop.cli.check:run",
        """\
strop check MODEL DATA ...            the arguments of strop train: sizes, memory, every error
strop check --command sft MODEL DATA  those of strop sft
strop check --full ...                also show tables, and all keys with the authors of their values
strop check --config-only ...         do not read data sets and rewards
strop check --time ...                load the models too, and measure how long the run takes""",
    ),
    "eval": _Command(
        "answer the prompts of a data set with a model, and score the answers",
        "strop.cli.evaluate:add_arguments",
        "strop.cli.evaluate:run",
        """\
strop eval MODEL --data data/gsm8k/test.parquet
strop eval MODEL --data data/gsm8k/test.parquet --n 8 --temperature 0.7 --limit 100
strop eval MODEL --data data/gsm8k/test.parquet --server http://127.0.0.1:8000 --token-env TOKEN
strop eval MODEL --data sums.csv --reward reward.py data.prompt_key=question data.answer_key=answer""",
    ),
    "serve": _Command(
        "serve a model for chat, as OpenAI's API has it",
        "strop.cli.serve:add_arguments",
        "strop.cli.serve:run",
        """\
strop serve MODEL
strop serve runs/first --best --port 8001
STROP_SERVE_TOKEN=secret strop serve MODEL --host 0.0.0.0      the key of the clients
Clients: OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=the key; see strop docs agents""",
    ),
    "prepare": _Command(
        "turn a data set into parquet files",
        "strop.cli.prepare:add_arguments",
        "strop.cli.prepare:run",
        """\
strop prepare gsm8k --source path/to/gsm8k --out data/gsm8k
strop prepare full_hh_rlhf --split-kind rm --source path/to/hh --out data/hh/rm
strop prepare table --source sums.csv --prompt question --answer answer --out data/sums
strop prepare arithmetic --max-operand 49 --held-out 0.1 --out data/arithmetic""",
    ),
    "score": _Command(
        "score a file of answers",
        "strop.cli.score:add_arguments",
        "strop.cli.score:run",
        """\
strop score answers.jsonl
strop score answers.parquet --response-column response --scorer math
strop score answers.jsonl --reward my_reward.py""",
    ),
    "export": _Command(
        "turn a checkpoint into a Hugging Face folder, or publish it on the hub",
        "strop.cli.export:add_arguments",
        "strop.cli.export:run",
        """\
strop export runs/first/global_step_100 --out models/first
strop export runs/first/global_step_100 --role critic --dtype bfloat16 --out models/critic
strop export runs/lora/global_step_100 --merge --out models/merged
strop export runs/first --push me/first               upload the run's model with a model card""",
    ),
    "view": _Command(
        "show metrics and samples of a run",
        "strop.cli.view:add_arguments",
        "strop.cli.view:run",
        """\
strop view runs/first
strop view runs/first --step 20 --sort score --samples 10
strop view runs/first --samples 3 --text "####"       answers that contain a text
strop view runs/first --uid 20-7                      all answers to one prompt
strop view runs/first --metrics 'actor/*'
strop view runs/first runs/second --web               a page, live while a run writes""",
    ),
    "report": _Command(
        "write the page of one or several runs as one HTML file",
        "strop.cli.page:add_arguments",
        "strop.cli.page:run",
        """\
strop report runs/first -o first.html
strop report runs/first runs/second -o both.html --steps 8 --samples 64""",
    ),
    "docs": _Command(
        "show a page of the documentation",
        "strop.cli.reference:add_docs_arguments",
        "strop.cli.reference:run_docs",
        "strop docs data",
    ),
    "keys": _Command(
        "find configuration keys by a word of their name or meaning",
        "strop.cli.reference:add_keys_arguments",
        "strop.cli.reference:run_keys",
        "strop keys lr",
    ),
}


def _overview(arguments_of: str = "") -> argparse.ArgumentParser:
    """Return the parser behind ``strop --help``; each command has its own for its arguments.

    ``arguments_of``: the command whose arguments it has all the same, for completion.
    """
    parser = argparse.ArgumentParser(
        prog="strop",
        description="Train language models with reinforcement learning.",
        epilog="strop COMMAND --help shows the arguments of a command, with examples.\n\nexamples:\n"
        "  strop prepare gsm8k --source path/to/gsm8k --out data/gsm8k\n"
        "  strop train MODEL data/gsm8k/train.parquet --out runs/first\n"
        "  strop view runs/first",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"strop {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        parser_of_command = commands.add_parser(name, help=command.summary)
        if name == arguments_of:
            load_backend(command.add_arguments)(parser_of_command)
    return parser


def _parser(name: str) -> argparse.ArgumentParser:
    command = _COMMANDS[name]
    parser = argparse.ArgumentParser(
        prog=f"strop {name}",
        description=f"{command.summary[0].upper()}{command.summary[1:]}.",
        epilog="examples:\n  " + command.examples.replace("\n", "\n  "),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    load_backend(command.add_arguments)(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    is_process = argv is None
    if argv is None:  # the whole process is the command's
        sys.excepthook = print_exception
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # in a locale that lacks a character of an answer
                stream.reconfigure(errors="backslashreplace")
        argv = sys.argv[1:]
        if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
            from strop.cli.completion import complete

            command = "".join(os.environ.get("COMP_LINE", "").split()[1:2])
            complete(_overview(command), command)
    if not argv:
        _overview().print_help()
        return 0
    if argv[0] not in _COMMANDS:
        _overview().parse_args(argv)
        return 2
    name = argv[0]
    if name not in _QUICK and not {"-h", "--help"} & set(argv):  # what follows imports packages for seconds
        sys.stderr.write(f"strop {__version__}: {name} is starting\n")
        sys.stderr.flush()
    if name == "check" and is_process and "--time" not in argv:
        gc.set_threshold(100_000)  # collections take a tenth of its time, and find nothing
    sys.path.insert(0, "")  # users' modules, named by import path, are in the current folder
    try:
        parser = _parser(name)
    except KeyboardInterrupt:  # it imports for a second
        sys.stderr.write("stopped by Ctrl-C\n")
        return 128 + signal.SIGINT
    arguments, unknown = parser.parse_known_intermixed_args(argv[1:])
    if name == "check":
        arguments.is_process = is_process
    if unknown:
        if "unknown" not in arguments:  # of a command that has no keys to name
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        arguments.unknown = unknown
    elif len(argv) == 1 and "unknown" in arguments:
        parser.error("no model and no data")
    return run_command(lambda: load_backend(_COMMANDS[name].run)(arguments), debug=arguments.debug)


_QUICK = ("view", "docs", "keys")
