"""Ending a process together with everything that it started."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path

MARKER = "STROP_REWARD_WORKER"
"""Environment variable that a scoring process and all its descendants carry; its value is theirs alone."""

_SWEEPS = 20
_END_MS = 2000


def kill_tree(process: subprocess.Popen[bytes], marker: str) -> int:
    """Kill the process, its group and (on Linux) descendants that left the group; the exit status.

    The process must lead its own group and must not have been waited for, so that its id is still its own.
    A descendant that left the group, took another environment, and whose parent ended before this call, is
    not found.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process.pid, signal.SIGSTOP)  # it starts no more while we look
    started = hold_descendants(process.pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing there any more but the leader
        os.killpg(process.pid, signal.SIGKILL)
    status = process.wait()
    kill_held(started)
    for _ in range(_SWEEPS):  # a descendant may be forking while we look
        found = marked_processes(marker)
        if not found:
            break
        for process_id in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process_id, signal.SIGKILL)
    return status


def descendants(root: int) -> list[int]:
    """Ids of what a process and its descendants started; none where there is no ``/proc``."""
    found = [root]
    for identity in found:  # grows while it is walked
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{identity}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found[1:]


def hold_descendants(root: int) -> list[int]:
    """A descriptor of each descendant, which means that process also when its parent is gone."""
    held = []
    for identity in descendants(root):
        with contextlib.suppress(OSError):  # it has ended
            held.append(os.pidfd_open(identity))
    return held


def kill_held(held: Iterable[int]) -> None:
    """Kill the processes of these descriptors, wait for their end, and close the descriptors."""
    held = list(held)
    for process in held:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
    for process in held:
        ended = select.poll()
        ended.register(process, select.POLLIN)
        ended.poll(_END_MS)
        os.close(process)


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
