"""``strop train``, ``sft``, ``train-rm`` and ``dpo``: from a command line to a trained model."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from strop.cli.options import log_to_console
from strop.config.load import load_tree
from strop.config.recipes import RECIPES
from strop.config.trees import DPO, PPO, REWARD_MODELLING, SFT, Root, Tree
from strop.trainer.commands import Loaded, fitted, train

logger = logging.getLogger(__name__)


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--config-path``, ``--config-name`` and Hydra overrides."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra overrides of the defaults")
    parser.add_argument("--config-name", "-cn", help="your own YAML file, laid over the defaults")
    parser.add_argument("--config-path", "-cp", help="the folder of that file, or the file itself")
    parser.set_defaults(recipe=None)


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a configuration, and ``--recipe``."""
    add_config_arguments(parser)
    parser.add_argument(
        "--recipe",
        metavar="NAME",
        help=f"values over the defaults and below your own: {', '.join(RECIPES)}, or your YAML file",
    )


def load_arguments(tree: Tree[Root], arguments: argparse.Namespace) -> Loaded[Root]:
    """Return the configuration of a command line, see ``fitted``; ``ConfigError`` has all load errors."""

    def load(defaults: Mapping[str, Any]) -> Root:
        return load_tree(
            tree,
            arguments.overrides,
            config_name=arguments.config_name,
            config_path=arguments.config_path,
            recipe=arguments.recipe,
            defaults=defaults,
        )

    return fitted(load)


NOT_UPLOADED = 3
"""Exit status of a run whose model is whole, but could not be uploaded."""


def run(tree: Tree, arguments: argparse.Namespace) -> int:
    """Train the kind of run that ``tree`` describes; return 0 or ``NOT_UPLOADED``."""
    config, data, batch_in_words = load_arguments(tree, arguments)
    log_to_console()
    if batch_in_words:
        logger.info("%s", batch_in_words)
    return 0 if train(config, data=data) else NOT_UPLOADED


run_train, run_sft = partial(run, PPO), partial(run, SFT)
run_train_rm, run_dpo = partial(run, REWARD_MODELLING), partial(run, DPO)
