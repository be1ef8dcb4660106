"""Files that are either whole or not there."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_path(path: Path) -> Generator[Path]:
    """A temporary path beside ``path`` (its folder is made); it becomes ``path`` when the block ends well.

    After an exception the temporary file is removed and what was at ``path`` before is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Keeps the suffix: some writers choose the format by it.
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace the file by ``text`` (UTF-8) in one step."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
