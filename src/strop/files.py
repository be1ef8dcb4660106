"""Files and folders that are whole or absent: written next to their place, renamed at the end; and JSON."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def atomic_path(path: str | Path, *, durable: bool = True) -> Generator[Path]:
    """Yield a temporary path next to ``path``, and move that file to ``path`` at the end.

    The folder is created. After an exception the temporary file is removed and ``path`` is untouched.
    ``durable`` forces the content to disk first.

    An OSError of the body that names no file, as for a full disk, gets ``path``.
    """
    path = Path(os.path.expanduser(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    # Some writers choose the format by the suffix.
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp{path.suffix}")
    try:
        yield temporary
        if durable:
            with temporary.open("rb+") as handle:
                # the rename may reach the disk before the content: a power cut would leave an empty file
                os.fsync(handle.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.errno is not None and error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Generator[Path]:
    """Yield an empty folder next to ``path``, and rename it to ``path`` at the end.

    After an exception it is removed; one that a killed process has left is removed first, so the caller holds
    a lock. Nothing is forced to disk.
    """
    partial = path.with_name(f"{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def atomic_write_text(path: str | Path, text: str) -> None:
    """Replace the file by ``text`` (UTF-8) in one step."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def take_usual_mode(path: Path) -> None:
    """Give a file the permissions of a new one, by the umask or the folder's access list.

    safetensors writes a temporary file, which its owner alone may read, and renames it.
    """
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        new.touch()
        with contextlib.suppress(OSError):  # of a mount without permissions
            path.chmod(new.stat().st_mode & 0o777)
    finally:
        new.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file; an empty one if there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def crash_point(name: str, iteration: int) -> None:
    """Kill this process if the environment variable ``STROP_CRASH_AT`` is ``name:iteration``.

    SIGKILL, as a power cut would stop it: tests resume from what is then on disk.
    """
    if os.environ.get("STROP_CRASH_AT") == f"{name}:{iteration}":
        os.kill(os.getpid(), signal.SIGKILL)
