"""``strop serve MODEL``: chat completions of a model over HTTP, as OpenAI's API has them."""

from __future__ import annotations

import argparse
import logging
import os
import secrets

from strop.cli.options import (
    add_address,
    add_model,
    log_to_console,
    naming_options,
    print_address,
)
from strop.config.backends import ROLLOUTS
from strop.config.checks.check import check
from strop.config.load import load_config
from strop.config.memory.facts import read_model_facts
from strop.config.names import is_installed
from strop.config.schema import Config
from strop.errors import MissingExtraError
from strop.trainer.commands import say_loading
from strop.trainer.evaluation import settings

logger = logging.getLogger(__name__)

_TOKEN = "STROP_SERVE_TOKEN"
_LONGEST, _UNKNOWN = 32768, 4096
_NAMES = {"actor_rollout_ref.model.path": "MODEL", "actor_rollout_ref.rollout.name": "--rollout"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model(parser)
    add_address(parser, 8000, "use the model")
    engines = ("auto", *(name for name, kind in ROLLOUTS.items() if kind.serves))
    add("--rollout", choices=engines, default="auto", help="engine that generates (auto)")
    add(
        "--max-length",
        type=int,
        metavar="TOKENS",
        help=f"of a request with its answer (the model's context, at most {_LONGEST})",
    )
    add("overrides", nargs="*", metavar="key=value", help="further keys, as for strop train")


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    log_to_console(_NAMES)
    if not is_installed("aiohttp"):
        raise MissingExtraError("aiohttp", "agents", "strop serve")
    with naming_options(_NAMES):
        config = config_from(arguments)
        check(config).report(logger)
    say_loading()
    from strop.trainer.serve import serving

    token = None if arguments.no_token else os.environ.get(_TOKEN) or secrets.token_hex(16)
    with serving(config, host=arguments.host, port=arguments.port, token=token) as (address, serve):
        print_address(address, "/v1", "use the model")
        if token is not None:
            print(f"key: {f'that of {_TOKEN}' if os.environ.get(_TOKEN) else token}", flush=True)
        serve()


def config_from(arguments: argparse.Namespace) -> Config:
    """Return the configuration of a command line, with the user's overrides over it."""
    names = ("model", "step", "best", "rollout")
    given = {name: getattr(arguments, name) for name in names}
    values = settings(data=["rows:requests"], temperature=1.0, **given)  # these rows are never read
    facts = read_model_facts(values["actor_rollout_ref.model.path"])
    length = arguments.max_length or min(facts.context if facts and facts.context else _UNKNOWN, _LONGEST)
    values["data"] |= {"max_prompt_length": length - 1, "max_response_length": 1}  # their sum counts
    values["trainer"] |= {"n_gpus_per_node": 1}
    return load_config(arguments.overrides, values=[values])
