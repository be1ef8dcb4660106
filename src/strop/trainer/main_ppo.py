"""``strop train``, which is ``python -m strop.trainer.main_ppo``: from a command line to a trained model.

Configuration mistakes are told before torch is imported; everything else is in ``strop.trainer.build``.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from strop.command import run_command
from strop.config.checks.check import check, check_loaded
from strop.config.load import Loaded, read_tree
from strop.config.schema import Config
from strop.config.trees import PPO

logger = logging.getLogger("strop")


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """``--config-path``, ``--config-name`` and Hydra overrides."""
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="Hydra overrides of ppo_trainer.yaml"
    )
    parser.add_argument("--config-name", "-cn", help="a YAML file of yours, laid over ppo_trainer.yaml")
    parser.add_argument("--config-path", "-cp", help="the folder of that file, or the file itself")


def config_from(arguments: argparse.Namespace) -> Config:
    """The configuration that a command line asks for.

    Raises:
        ConfigError: keys that do not exist or do not fit, together with all other errors that can be seen.
    """
    return get_loaded(loaded_from(arguments))


def get_loaded(loaded: Loaded[Config]) -> Config:
    """The configuration; one that could not be loaded whole is a ``ConfigError`` with its other errors."""
    if loaded.problems:
        check_loaded(loaded).raise_errors()
    return loaded.get()


def loaded_from(arguments: argparse.Namespace) -> Loaded[Config]:
    """What a command line comes to, with its mistakes."""
    return read_tree(
        PPO, arguments.overrides, config_name=arguments.config_name, config_path=arguments.config_path
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(prog="strop train", description="Train a language model with PPO.")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    add_config_arguments(parser)
    arguments = parser.parse_intermixed_args(argv)
    return run_command(lambda: run(config_from(arguments)), debug=arguments.debug)


def run(config: Config) -> int:
    """Train as ``config`` says; returns 0."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logger.setLevel(logging.INFO)
    require_valid(config)
    from strop.trainer.restart import train_with_restarts  # torch and transformers: seconds

    train_with_restarts(config)
    return 0


def require_valid(config: Config) -> None:
    """All errors of the configuration as one ``ConfigError``; warnings are told by the trainer."""
    check(config).raise_errors()


if __name__ == "__main__":
    sys.exit(main())
