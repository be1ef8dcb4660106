"""Separate process that holds the lock of a run folder, like a training run."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from strop.trainer.run_folder import run_lock

import forked


def _hold(folder: Path, then: str) -> None:
    with run_lock(folder):
        print("held", flush=True)
        exec(then)
        time.sleep(600)


@contextmanager
def holding(folder: Path, then: str = "") -> Generator[forked.Child]:
    """Start a process that takes the lock and runs the code ``then``; kill it when the block ends."""
    with forked.start(_hold, folder, then) as holder:
        while "held" not in holder.stdout:
            assert holder.poll() is None, holder.stderr
            time.sleep(0.02)
        yield holder
