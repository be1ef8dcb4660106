"""Faults of the disk for tests: a full one, where this process may mount one, and the refusal alone."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest


@contextlib.contextmanager
def small_disk(at: Path, size: str) -> Generator[Path]:
    """A file system of ``size`` at the folder ``at``, which is made. Skips the test without a right to."""
    at.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(at)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"A REAL FULL DISK IS NOT TESTED: no right to mount one here ({made.stderr.strip()})")
    try:
        yield at
    finally:
        subprocess.run(["umount", str(at)], check=True)


def no_room(*arguments: Any, **options: Any) -> None:
    """What writing to a full disk does."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
