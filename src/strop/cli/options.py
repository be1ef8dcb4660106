"""Shared by commands: an option, and messages in their words (``--data`` instead of ``data.val_files``)."""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from strop.errors import StropError, reword
from strop.listening import LOOPBACK, Address
from strop.terminal import PrintableFormatter


def in_options(text: str, names: Mapping[str, str]) -> str:
    """Replace the keys of ``names`` in a message by their options; longer keys that contain one stay."""
    if not names:
        return text
    keys = "|".join(re.escape(key) for key in sorted(names, reverse=True))  # the longer one first
    text = re.sub(rf"(?<![\w.])({keys})((?<==)|(?![\w]|\.\w))", lambda key: names[key[1]], text)
    return re.sub(r"for example [A-Z]+=", "for example ", text)  # MODEL and DATA are written as they are


def naming_function(reward: str) -> dict[str, str]:
    """Return the option that chooses another function of the file in ``--reward``, by the key's beginning."""
    return {"custom_reward_function.name=": f"--reward {re.sub(r':[^:/]*$', '', reward)}:"}


class OneReward(argparse.Action):
    """Store a reward function; another one in the same command is an error, not a replacement."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        if (before := getattr(namespace, self.dest)) not in (None, values):
            raise argparse.ArgumentError(
                self,
                f"found {before} and {values}, expected one function; more are parts of the score: "
                "'reward_model.parts={NAME: {scorer: MODULE:FUNCTION, weight: 1}}'",
            )
        setattr(namespace, self.dest, values)


@contextmanager
def naming_options(names: Mapping[str, str]) -> Generator[None]:
    """Replace keys by options in the message of an error of strop that the body raises."""
    try:
        yield
    except StropError as error:
        reword(error, partial(in_options, names=names))
        raise


def log_to_console(names: Mapping[str, str] | None = None) -> None:
    """Log strop's own messages from level INFO, those of other packages from WARNING.

    ``names``: the options of a command, by the keys that they set; see ``in_options``.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter("%(message)s", partial(in_options, names=names or {})))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("strop").setLevel(logging.INFO)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the model of a command that generates."""
    of_what = "a Hugging Face folder or name, a .gguf file, a run folder or checkpoint"
    parser.add_argument("model", metavar="MODEL", help=of_what)
    add_choice_of_iteration(parser)


def add_choice_of_iteration(parser: argparse.ArgumentParser) -> None:
    """Add ``--step`` and ``--best``, for commands that take a run folder."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--step", type=int, metavar="N", help="of a run folder: iteration N (default: the last one)"
    )
    which.add_argument(
        "--best", action="store_true", help="of a run folder: the iteration with the best validation"
    )


def add_address(parser: argparse.ArgumentParser, port: int | None, use: str, when: str = "") -> None:
    """Add the arguments of a server, whose clients may ``use`` it; ``port`` None: see ``Address``."""
    add, usual = parser.add_argument, "8390, or a free one" if port is None else f"{port}; 0: a free one"
    add("--host", default=LOOPBACK, help=f"{when}the address to listen at ({LOOPBACK}: this machine)")
    add("--port", type=int, default=port, help=f"{when}the port ({usual})")
    add("--no-token", action="store_true", help=f"{when}whoever reaches the address may {use}")


def print_address(address: Address, path: str, use: str) -> None:
    """Print where a server listens."""
    print(f"{address.url}{path}  (Ctrl-C ends)", flush=True)
    if outside := address.url_outside:
        print(f"{outside}{path}  from other machines", flush=True)
    if address.token is None:
        print(f"Everyone who reaches this address can {use}: it has no token.", flush=True)
