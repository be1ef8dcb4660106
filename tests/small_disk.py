"""Disk faults: a small real file system where mounting is permitted, and a write that raises ENOSPC."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import subprocess
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest


@contextlib.contextmanager
def small_disk(at: Path, size: str) -> Generator[Path]:
    """Mount a file system of ``size`` at the new folder ``at``; skip the test if not permitted."""
    at.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(at)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"A REAL FULL DISK IS NOT TESTED: no right to mount one here ({made.stderr.strip()})")
    try:
        yield at
    finally:
        _unmount(at)


def _unmount(at: Path, within_s: float = 10.0) -> None:
    """Unmount ``at``; a thread whose write has failed closes its file a moment after its error is seen."""
    end = time.monotonic() + within_s
    while (done := subprocess.run(["umount", str(at)], capture_output=True, text=True)).returncode:
        if time.monotonic() > end:
            raise AssertionError(f"a file on {at} is still open: {done.stderr.strip()}")
        gc.collect()
        time.sleep(0.05)


def no_room(*arguments: Any, **options: Any) -> None:
    """Raise the error of writing to a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
