"""``strop train``, ``distill``, ``sft``, ``train-rm`` and ``dpo``: from a command line to a trained model.

Imports for a run are in its functions, so that help is printed at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from strop.cli.options import OneReward, in_options, log_to_console, naming_function, naming_options
from strop.errors import ConfigError

if TYPE_CHECKING:
    from strop.config.trees import Root, Tree
    from strop.trainer.commands import Loaded

logger = logging.getLogger(__name__)


def add_config_arguments(parser: argparse.ArgumentParser, words: str = "MODEL DATA") -> None:
    """Add MODEL and DATA, the options of every kind of run, ``--config`` and Hydra overrides."""
    add = parser.add_argument
    parser.usage = f"{parser.prog} {words} [OPTION ...] [key=value ...]\n       {parser.prog} key=value ..."
    parser.set_defaults(command=parser.prog.split()[-1], prog=parser.prog, unknown=(), recipe=None)
    keys = "and keys over the defaults, as in Hydra"
    add("overrides", nargs="*", metavar=f"{words} key=value", help=keys)
    add("--lr", type=float, metavar="X", help="learning rate")
    add("--steps", type=int, metavar="N", help="iterations of the run")
    add("--out", metavar="DIR", help="run folder; the same command again resumes from it")
    add("--config-path", "--config", "-cp", metavar="FILE", help="your own YAML, or its folder")
    add("--config-name", "-cn", metavar="NAME", help="name of the file in that folder")
    for name in ("model", "data"):  # refused, with the words to write
        add(f"--{name}", dest=f"{name}_option", help=argparse.SUPPRESS)


def add_train_arguments(parser: argparse.ArgumentParser, words: str = "MODEL DATA") -> None:
    """Add the arguments of ``add_config_arguments``, and those of reinforcement learning."""
    add_config_arguments(parser, words)
    add = parser.add_argument
    what = "Python file with your reward function, or a reward model"
    add("--reward", action=OneReward, metavar="FILE[:NAME]", help=what)
    add("--algorithm", metavar="NAME", help="grpo, ppo, rloo, reinforce++, remax, or another estimator")
    add("--n", type=int, metavar="N", help="responses to each prompt")
    by_default = "; the algorithm's, or grpo, unless all is key=value"
    add(
        "--recipe",
        metavar="NAME",
        help=f"grpo, ppo, distill or your YAML file: values below your own{by_default}",
    )


def add_distill_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``add_train_arguments``, with STUDENT and TEACHER in place of MODEL."""
    add_train_arguments(parser, "STUDENT TEACHER DATA")
    parser.set_defaults(recipe="distill")


def short_form(
    tree: Tree, arguments: argparse.Namespace
) -> tuple[dict[str, Any], str | None, dict[str, str]]:
    """Return the keys and the recipe that MODEL, DATA and options stand for, and names for messages.

    The names are the arguments by the keys that they set; none if there are keys alone. Raises
    ``ConfigError`` if the arguments do not fit together.
    """
    from strop.config.recipes import by_algorithm
    from strop.config.trees import PPO
    from strop.trainer.evaluation import reward_keys

    words = [text for text in arguments.overrides if is_word(text)]
    given = {name: value for name in PPO.short if (value := getattr(arguments, name, None)) is not None}
    positions, short = {"model": "MODEL", "data": "DATA"}, tree.short
    written = {text.partition("=")[0].lstrip("+~") for text in arguments.overrides if not is_word(text)}
    if arguments.command == "distill":
        positions = {"model": "STUDENT", "teacher": "TEACHER", "data": "DATA"}
        short = {**short, "teacher": "teacher.model.path"}
        if len(words) < len(positions) and written & {"teacher.by_source", "teacher.servers"}:
            del positions["teacher"], short["teacher"]
    given |= dict(zip(positions, words, strict=False))
    if str(files := given.get("data", "")).startswith("[") and files.endswith("]"):
        given["data"] = [name.strip(" '\"") for name in files[1:-1].split(",")]
    labels = {name: f"--{name}" for name in short} | positions
    names = {key: labels[name] for name, key in short.items() if key not in written}
    problems = [in_options(problem, names) for problem in _wrong_options(tree, arguments)]
    problems += [f"--{name}: no option of strop {arguments.command}" for name in given if name not in labels]
    problems += [
        f"{labels[name]} and {key}=...: the same, given twice; leave one out"
        for name, key in short.items()
        if name in given and key in written
    ]
    if len(words) > len(positions) and any("=" in (text[:1], text[-1:]) for text in arguments.overrides):
        problems.append("found a space beside a =; write key=value")
    if len(words) > len(positions) and not problems:
        first, files = words[: len(positions) - 1], words[len(positions) - 1 :]
        problems.append(
            f"expected {' and '.join(positions.values())}, found {' '.join(words)}; for several files write "
            f"{arguments.prog} {' '.join(first)} {short['data']}=[{','.join(files)}]"
        )
    if problems:
        raise ConfigError(*problems)
    recipe, keys = arguments.recipe, {short[name]: value for name, value in given.items()}
    if "algorithm" in short and (words or arguments.algorithm):
        of_algorithm, estimator = by_algorithm(arguments.algorithm)
        recipe = recipe or of_algorithm
        keys |= {short["algorithm"]: estimator} if estimator else {}
    if "reward" in given:
        del keys[short["reward"]]
        keys |= (of_reward := reward_keys(given["reward"]))
        names |= dict.fromkeys(of_reward, "--reward") | naming_function(given["reward"])
    return keys, recipe, names if given else {}


def is_word(text: str) -> bool:
    """Return True for MODEL and DATA; ``~key`` removes a key, and a URL or a folder's name may have a "="."""
    is_key = "=" in text or re.fullmatch(r"~[^/]+", text)
    return not is_key or "://" in text.partition("=")[0] or os.path.exists(text)


def _wrong_options(tree: Tree, arguments: argparse.Namespace) -> Generator[str]:
    """Yield what to write in the place of options that do not exist."""
    from strop.config.keys import all_keys, unknown_key

    model, data = arguments.model_option, arguments.data_option
    if model or data:
        yield f"--model and --data: write {arguments.prog} {model or 'MODEL'} {data or 'DATA'}"
    for text in arguments.unknown:
        name = text.lstrip("-").partition("=")[0].replace("-", "_")
        if name in all_keys(tree.schema):
            yield f"{text}: write {name}=VALUE"
        elif text.startswith("-"):  # else its value
            yield f"--{unknown_key(name, tree.schema)}"


def load_arguments(tree: Tree[Root], arguments: argparse.Namespace) -> tuple[Loaded[Root], dict[str, str]]:
    """Return the configuration of a command line, see ``fitted``, and the names of ``short_form``.

    ``ConfigError`` has all load errors.
    """
    from strop.config.load import load_tree
    from strop.trainer.commands import fitted

    keys, recipe, names = short_form(tree, arguments)
    given = [text for text in arguments.overrides if not is_word(text)]

    options = {"config_name": arguments.config_name, "config_path": arguments.config_path, "recipe": recipe}
    with naming_options(names):
        return fitted(
            lambda defaults: load_tree(tree, given, defaults=defaults, values=[keys], **options)
        ), names


NOT_UPLOADED = 3
"""Exit status of a run whose model is whole, but could not be uploaded."""


def run(arguments: argparse.Namespace) -> int:
    """Train the kind of run of the command; return 0 or ``NOT_UPLOADED``."""
    from strop.config.trees import PPO, TREES
    from strop.trainer.commands import train

    (config, data, batch_in_words), names = load_arguments(TREES.get(arguments.command, PPO), arguments)
    log_to_console(names)
    if batch_in_words:
        logger.info("%s", batch_in_words)
    with naming_options(names):
        return 0 if train(config, data=data) else NOT_UPLOADED
