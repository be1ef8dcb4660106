"""Kill a process together with everything that it started."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path

MARKER = "STROP_REWARD_WORKER"
"""Environment variable of a scoring process and its descendants, with a unique value."""

_SWEEPS = 20
_END_MS = 2000


def kill_tree(process: subprocess.Popen[bytes], marker: str) -> int:
    """Kill the process, its group and (on Linux) descendants that left the group; return the exit status.

    The process must lead its group and must not have been reaped, so that its id is still valid. Misses a
    descendant that left the group, changed its environment, and whose parent ended before this call.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process.pid, signal.SIGSTOP)  # so that it starts no more meanwhile
    started = hold_descendants(process.pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # only the leader is left
        os.killpg(process.pid, signal.SIGKILL)
    status = process.wait()
    kill_held(started)
    for _ in range(_SWEEPS):  # a descendant may fork meanwhile
        found = marked_processes(marker)
        if not found:
            break
        for process_id in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process_id, signal.SIGKILL)
    return status


def descendants(root: int) -> list[int]:
    """Return the ids of a process's descendants; none where there is no ``/proc``."""
    found = [root]
    for identity in found:  # grows during the loop
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{identity}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found[1:]


def hold_descendants(root: int) -> list[int]:
    """Return a pidfd of each descendant, which stays valid when its parent is gone."""
    held = []
    for identity in descendants(root):
        with contextlib.suppress(OSError):  # it has ended
            held.append(os.pidfd_open(identity))
    return held


def kill_held(held: Iterable[int]) -> None:
    """Kill the processes of these pidfds, wait for their end, and close the descriptors."""
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
    """Return the ids of processes with the marker in their environment; none where there is no ``/proc``."""
    wanted = f"{MARKER}={marker}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def describe_exit(status: int) -> str:
    """Return ``exit status 3``, or ``signal SIGKILL``."""
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-status).name}"
    return f"signal {-status}"
