"""Ending a process together with everything that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

MARKER = "STROP_REWARD_WORKER"
"""Environment variable that a scoring process and all its descendants carry; its value is theirs alone."""

_SWEEPS = 20


def kill_tree(process: subprocess.Popen[bytes], marker: str) -> int:
    """Kill the process, its group and (on Linux) descendants that left the group; the exit status.

    The process must lead its own group and must not have been waited for, so that its id is still its own.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing there any more but the leader
        os.killpg(process.pid, signal.SIGKILL)
    status = process.wait()
    for _ in range(_SWEEPS):  # a descendant may be forking while we look
        found = marked_processes(marker)
        if not found:
            break
        for process_id in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process_id, signal.SIGKILL)
    return status


def marked_processes(marker: str) -> list[int]:
    """Ids of the living processes whose environment holds the marker; none where there is no ``/proc``."""
    wanted = f"{MARKER}={marker}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or it is another user's
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def describe_exit(status: int) -> str:
    """``exit status 3``, or the name of the signal that ended it."""
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-status).name}"
    return f"signal {-status}"
