"""Surroundings of a run that a program or a notebook starts: messages, interrupts, generators, processes."""

from __future__ import annotations

import ast
import contextlib
import functools
import logging
import random
import re
import signal
import sys
from collections.abc import Callable, Generator
from typing import Any, ParamSpec, TypeVar

import yaml

from strop.errors import StropError, reword, signals_interrupt

P = ParamSpec("P")
R = TypeVar("R")


def in_session(command: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Run a function in a ``session``; its errors show no frames of strop, and keys as Python writes them."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                with session(command):
                    return function(*args, **kwargs)
            except (StropError, KeyboardInterrupt) as error:
                logging.getLogger("strop").debug("where it was raised", exc_info=True)
                if isinstance(error, StropError):
                    reword(error, functools.partial(in_python, command=command))
                raise error.with_traceback(None) from None

        return call

    return decorate


_VALUE = r"\.\.\.|\[[^\]]*\]|\{[^}]*\}|'[^']*'|[^\s,;)]*[^\s,;).:?]"

_NEIGHBOURS = re.compile(r"\b(\w+)=dict\(([^()]*)\) \1=dict\(([^()]*)\)")
"""Two keys of one section, each as an argument: an argument is given once."""


def in_python(text: str, command: str) -> str:
    """Replace each key in a message by the argument that sets it, as in ``data=dict(prompt_key='q')``."""
    if not re.search(r"[a-z]\.[a-z]", text) or re.match(r"\w+: +strop ", text):
        return text  # the first line, before the configuration is imported, or a command
    from strop.config.keys import all_keys
    from strop.config.trees import TREES

    tree = TREES.get(command, TREES["train"])
    short = {key: name for name, key in tree.short.items()}

    def argument(found: re.Match[str]) -> str:
        *sections, last = [short[found[1]]] if found[1] in short else found[1].split(".")
        if found[2] is None and not sections:
            return last
        word = f"{last}={'...' if found[2] is None else _literal(found[2])}"
        return functools.reduce(lambda inner, section: f"{section}=dict({inner})", reversed(sections), word)

    keys = "|".join(re.escape(key) for key, facts in all_keys(tree.schema).items() if not facts.is_section)
    found = re.sub(rf"(?<![\w./])({keys})(?!\w|\.\w)(?:=({_VALUE}))?", argument, text)
    while (joined := _NEIGHBOURS.sub(r"\1=dict(\2, \3)", found)) != found:
        found = joined
    if rows := re.match(r"rows:(train|val)-", found):  # they are the argument itself, which becomes a dict
        found = found.replace("set data=dict(", f"set data=dict({rows[1]}_files=rows, ")
    return found


def _literal(value: str) -> str:
    """Return a value in the words of YAML as Python writes it."""
    for read in (ast.literal_eval, yaml.safe_load):
        with contextlib.suppress(ValueError, TypeError, SyntaxError, yaml.YAMLError):
            return repr(read(value)) if value != "..." else value
    return repr(value)


@contextlib.contextmanager
def session(command: str) -> Generator[None]:
    """Show strop's messages; restore handlers of signals and logs, and end what the body left running.

    An interrupt is raised after the body, as what it is, also if a library replaced it by another error.
    """
    from strop.tracking.console import in_notebook
    from strop.version import __version__

    stream = sys.stdout if in_notebook() else sys.stderr  # a notebook shows errors on red
    with _logging_to(stream, command), _private_cluster_ended():
        logging.getLogger("strop").info("strop %s: %s is starting", __version__, command)
        received: list[int] = []
        try:
            with signals_interrupt(received):
                yield
        except BaseException as error:
            if ended := next((number for number in received if number != signal.SIGINT), None):
                for note in getattr(error, "__notes__", []):  # Python prints no SystemExit
                    logging.getLogger("strop").warning("%s", note)
                raise SystemExit(128 + ended) from error
            if received and not isinstance(error, KeyboardInterrupt):
                interrupt = KeyboardInterrupt()
                for note in getattr(error, "__notes__", []):
                    interrupt.add_note(note)
                raise interrupt from error
            raise


@contextlib.contextmanager
def _logging_to(stream: Any, command: str) -> Generator[None]:
    from strop.terminal import PrintableFormatter

    logger = logging.getLogger("strop")
    before = logger.level
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PrintableFormatter("%(message)s", functools.partial(in_python, command=command)))
    shows = not logger.hasHandlers()  # else the program has set up its own
    if shows:
        logger.addHandler(handler)
    if before == logging.NOTSET:
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


@contextlib.contextmanager
def generators_kept() -> Generator[None]:
    """Restore the global random generators, which a run seeds for users' code; with gradients in the body."""
    import numpy as np

    from strop.trainer.commands import say_loading

    say_loading()
    import torch

    states = random.getstate(), np.random.get_state()
    on_gpu = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        # a notebook may have turned gradients off, to generate
        with torch.random.fork_rng(devices=on_gpu), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextlib.contextmanager
def _private_cluster_ended() -> Generator[None]:
    """End the Ray cluster that the body starts; one to which the program is connected stays."""
    ray = sys.modules.get("ray")
    was_connected = ray is not None and ray.is_initialized()
    try:
        yield
    finally:
        cluster = sys.modules.get("strop.controller.ray.cluster")
        if cluster is not None and not was_connected:
            cluster.disconnect()
