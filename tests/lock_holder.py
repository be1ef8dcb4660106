"""Separate process that holds the lock of a run folder, like a training run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

_CODE = """
import os, sys, time
from pathlib import Path
from strop.trainer.run_folder import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    exec(sys.argv[2])
    time.sleep(600)
"""


@contextmanager
def holding(folder: Path, then: str = "") -> Generator[subprocess.Popen[str]]:
    """Start a process that takes the lock and runs the code ``then``; kill it when the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", _CODE, str(folder), then], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
