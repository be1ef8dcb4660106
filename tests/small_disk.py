"""Disk faults: a small real file system where mounting is permitted, and a write that raises ENOSPC."""

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
        subprocess.run(["umount", str(at)], check=True)


def no_room(*arguments: Any, **options: Any) -> None:
    """Raise the error of writing to a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
