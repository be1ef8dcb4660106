"""Surroundings of a run that a program or a notebook starts: messages, interrupts, generators, processes."""

from __future__ import annotations

import contextlib
import logging
import random
import signal
import sys
from collections.abc import Generator
from typing import Any, NoReturn


@contextlib.contextmanager
def session(command: str) -> Generator[None]:
    """Show strop's messages; restore handlers of signals and logs, and end what the body left running.

    An interrupt is raised after the body, as what it is, also if a library replaced it by another error.
    """
    from strop.errors import signals_interrupt
    from strop.tracking.console import in_notebook
    from strop.version import __version__

    stream = sys.stdout if in_notebook() else sys.stderr  # a notebook shows errors on red
    with _logging_to(stream), _private_cluster_ended():
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
                _interrupted(error)
            raise


def _interrupted(error: BaseException) -> NoReturn:
    interrupt = KeyboardInterrupt()
    for note in getattr(error, "__notes__", []):
        interrupt.add_note(note)
    raise interrupt from error


@contextlib.contextmanager
def _logging_to(stream: Any) -> Generator[None]:
    from strop.terminal import PrintableFormatter

    logger = logging.getLogger("strop")
    before = logger.level
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PrintableFormatter("%(message)s"))
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
    """Restore the global random generators, which a run seeds for users' code."""
    import numpy as np

    from strop.trainer.commands import say_loading

    say_loading()
    import torch

    states = random.getstate(), np.random.get_state()
    on_gpu = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=on_gpu):
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
