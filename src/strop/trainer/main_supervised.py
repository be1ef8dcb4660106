"""``strop sft`` and ``strop train-rm``: from a command line to a trained model.

Configuration mistakes are told before torch is imported.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from functools import partial

from strop.config.checks.supervised import Supervised, get_loaded, require_valid
from strop.config.load import read_tree
from strop.config.schema.supervised import RewardModellingConfig, SftConfig
from strop.config.trees import REWARD_MODELLING, SFT, Tree

logger = logging.getLogger("strop")


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """``--config-path``, ``--config-name`` and Hydra overrides."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra overrides of the defaults")
    parser.add_argument("--config-name", "-cn", help="a YAML file of yours, laid over the defaults")
    parser.add_argument("--config-path", "-cp", help="the folder of that file, or the file itself")


def config_from(tree: Tree[Supervised], arguments: argparse.Namespace) -> Supervised:
    """The configuration that a command line asks for."""
    return get_loaded(
        read_tree(
            tree, arguments.overrides, config_name=arguments.config_name, config_path=arguments.config_path
        )
    )


def run_sft(arguments: argparse.Namespace) -> int:
    """Fine-tune as the command line says; returns 0."""
    sft(config_from(SFT, arguments))
    return 0


def run_train_rm(arguments: argparse.Namespace) -> int:
    """Train a reward model as the command line says; returns 0."""
    train_reward_model(config_from(REWARD_MODELLING, arguments))
    return 0


def sft(config: SftConfig) -> None:
    """Fine-tune as ``config`` says."""
    _prepare(config)
    from strop.trainer.supervised import SftTrainer, train_once

    _train(config, partial(train_once, SftTrainer))


def train_reward_model(config: RewardModellingConfig) -> None:
    """Train a reward model as ``config`` says."""
    _prepare(config)
    from strop.trainer.supervised import RewardModelTrainer, train_once

    _train(config, partial(train_once, RewardModelTrainer))


def _prepare(config: Supervised) -> None:
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logger.setLevel(logging.INFO)
    require_valid(config)  # the warnings are told when the trainer is built


def _train(config: Supervised, train_once: Callable[[Supervised], None]) -> None:
    from strop.trainer.restart import with_restarts

    with_restarts(config, train_once)
