"""One run at a time in a run folder."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from strop.errors import ConfigError

LOCK_FILE = ".lock"
"""In the run folder; it stays when the run has ended, and then says nothing."""

_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK}
"""What file systems without locks answer: Lustre mounted without flock, NFS without a lock service."""

_MOMENT_S = 2.0
"""So long the children of a process that was killed may take to let go of what they inherited."""

logger = logging.getLogger(__name__)


@contextmanager
def run_lock(folder: Path) -> Generator[None]:
    """No other run writes to ``folder`` (it exists) inside; ``ConfigError`` when one does already.

    The operating system holds the lock and releases it with the process, however that dies, so a resume
    finds it free. The same thread may take it again inside. A file system without locks gets a warning: a
    file that merely exists would do there, but a killed process leaves it behind, and no resume could tell.
    """
    folder = folder.resolve()  # the same folder by another name is the same lock
    lock = FileLock(folder / LOCK_FILE, is_singleton=True, fallback_to_soft=False)
    try:
        lock.acquire(timeout=_MOMENT_S)
    except Timeout as error:
        raise ConfigError(
            f"trainer.default_local_dir={folder}: {_holder(folder / LOCK_FILE)} runs there, and two runs "
            "would overwrite each other's files; wait for its end, end it, or name another folder"
        ) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning(
            "warning: the file system of %s has no locks (%s): see to it yourself that no second run is "
            "started there",
            folder,
            os.strerror(error.errno),
        )
        yield
        return
    is_outermost = lock.lock_counter == 1
    try:
        if is_outermost:
            _write(folder / LOCK_FILE, _signature())
        yield
    finally:
        if is_outermost:
            _write(folder / LOCK_FILE, "")
        lock.release()


def _signature() -> str:
    """Whose lock it is."""
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    return json.dumps(holder) + "\n"


def _write(path: Path, text: str) -> None:
    """On a full disk it stays unsaid, and the lock holds all the same."""
    with contextlib.suppress(OSError):
        path.write_text(text)


def _holder(path: Path) -> str:
    """Who holds it, in words."""
    try:
        holder = json.loads(path.read_text())
        return f"process {holder['pid']} on {holder['host']} (since {holder['since']})"
    except (OSError, ValueError, TypeError, KeyError):  # it could not be written, or is being written
        return "another process"
