"""Whether the head of the cluster still answers.

Without it nothing can be started, ended or asked on the cluster. Ray itself would wait a minute for it and
then end the driver from native code.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterable, Mapping
from typing import Any

import psutil  # comes with Ray
import ray

_ANSWERS_S = 2.0
_PATIENCE_S = 5.0


def answers(address: str) -> bool:
    """Whether somebody listens at ``host:port``."""
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWERS_S).close()
    except OSError:
        return False
    return True


class HeadWatch:
    """Asked about once a second, says when the head has been away for too long."""

    def __init__(self) -> None:
        self.address = ray.get_runtime_context().gcs_address
        self._answered = time.monotonic()

    def answers(self) -> bool:
        """Whether it is there."""
        return answers(self.address)

    def is_lost(self) -> bool:
        """Whether nobody has answered there for ``_PATIENCE_S``."""
        if self.answers():
            self._answered = time.monotonic()
        return time.monotonic() - self._answered > _PATIENCE_S

    def restart(self) -> None:
        """Nobody has asked for a while."""
        self._answered = time.monotonic()


def end_without_head(processes: Iterable[Mapping[str, Any]]) -> None:
    """Kill those of these processes that are on this node; other nodes end theirs when they miss the head.

    So will what belongs to a Ray of this run alone: the children of its raylet, which would wait a minute.
    """
    here = ray.get_runtime_context().get_node_id()
    for facts in processes:
        if facts.get("node_id") == here:
            with contextlib.suppress(ProcessLookupError):
                os.kill(facts["pid"], signal.SIGKILL)
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.parent().name() == "raylet":
                child.kill()
