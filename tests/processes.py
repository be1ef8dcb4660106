"""Processes that run on this machine (``ps`` is in no minimal system)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

import psutil


def commands() -> list[str]:
    """Return the command lines of all processes."""
    return [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]


def with_token(token: str) -> list[str]:
    """Return the commands of processes that were started with this value of STROP_TEST_TOKEN."""
    return [
        " ".join(process.info["cmdline"] or ())
        for process in psutil.process_iter(["cmdline", "environ"])
        if (process.info["environ"] or {}).get("STROP_TEST_TOKEN") == token
    ]


def none_left(look: Callable[[], Collection[Any]], seconds: float = 60) -> bool:
    """Return True once ``look`` finds nothing: a killed process is listed until it has had a core."""
    deadline = time.monotonic() + seconds
    while look():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
