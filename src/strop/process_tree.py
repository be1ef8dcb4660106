"""Kill a process together with everything that it started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

MARKER = "STROP_REWARD_WORKER"
"""Environment variable of a process of the run and its descendants, with a unique value."""

_SWEEPS = 20
_END_MS = 10_000  # a process that holds much memory takes a while to end
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37


def kill_tree(process: subprocess.Popen[bytes], marker: str) -> int:
    """Kill the process, its group and (on Linux) descendants that left the group; return the exit status.

    The process must lead its group and must not have been reaped, so that its id is still valid. Misses a
    descendant that left the group, changed its environment, and whose parent ended before this call.
    """
    with adopting_orphans():
        started = hold_descendants(process.pid, stop=True)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # only the leader is left
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
        kill_held(started)
        kill_marked(marker)
    return status


def kill_marked(marker: str, variable: str = MARKER) -> None:
    """Kill the processes with the marker in their environment, but for this one."""
    for _ in range(_SWEEPS):  # one may fork meanwhile
        found = set(marked_processes(marker, variable)) - {os.getpid()}
        if not found:
            break
        _kill(found)


def kill_descendants(root: int) -> None:
    """Kill what a process has started; what its ended children started only if it is a subreaper."""
    for _ in range(_SWEEPS):  # one may fork meanwhile
        if not (found := descendants(root)):
            break
        _kill(found)


def _kill(identities: Iterable[int]) -> None:
    held = _hold(identities)
    for identity in identities:  # gVisor and the like have no pidfds
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(identity, signal.SIGKILL)
    kill_held(held)


def become_subreaper() -> None:
    """Adopt descendants whose parents end, from now on (Linux only), so that this process can end them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


_adopting = threading.Lock()
_adopters = 0
_adopts_anyway = ctypes.c_int(0)


@contextlib.contextmanager
def adopting_orphans() -> Generator[None]:
    """Adopt descendants whose parents end meanwhile (on Linux), so that ``kill_held`` can wait for them.

    Otherwise they go to process 1, and where that does not wait for its children, as in an ordinary
    container, each stays a zombie. Not for longer: then orphans of other libraries would come here too.
    """
    global _adopters
    if sys.platform != "linux":
        yield
        return
    control = ctypes.CDLL(None).prctl
    with _adopting:
        if not _adopters:
            control(_PR_GET_CHILD_SUBREAPER, ctypes.byref(_adopts_anyway), 0, 0, 0)
            control(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        _adopters += 1
    try:
        yield
    finally:
        with _adopting:
            _adopters -= 1
            if not _adopters:
                control(_PR_SET_CHILD_SUBREAPER, _adopts_anyway.value, 0, 0, 0)


def descendants(root: int, *, stop: bool = False) -> list[int]:
    """Return the ids of a process's descendants; none where there is no ``/proc``.

    With ``stop``, stop each, the root included, before listing its children, so that none is missed.
    """
    found = [root]
    for identity in found:  # grows during the loop
        if stop:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(identity, signal.SIGSTOP)
        found += _children(identity)
    return found[1:]


def _children(identity: int) -> Iterator[int]:
    if not os.path.exists("/proc/thread-self/children"):  # the kernel keeps no lists, as of gVisor
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == identity:
                    yield int(entry.name)
        return
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{identity}/task"):
            yield from map(int, read_process_file(f"{identity}/task/{task}/children").split())


def read_process_file(name: str) -> bytes:
    """Return the content of a file in ``/proc``, without buffers: watching a sandbox reads many."""
    with open(f"/proc/{name}", "rb", buffering=0) as file:
        return file.read()


def hold_descendants(root: int, *, stop: bool = False) -> list[int]:
    """Return a pidfd of each descendant, which stays valid when its parent is gone.

    With ``stop``, stop the root and them, so that they start no more processes.
    """
    return _hold(descendants(root, stop=stop))


def _hold(identities: Iterable[int]) -> list[int]:
    held = []
    for identity in identities:
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
    for process in held:  # only once all have ended: then all orphans among them are adopted
        with contextlib.suppress(ChildProcessError):  # its parent waits for it
            os.waitid(os.P_PIDFD, process, os.WEXITED | os.WNOHANG)
        os.close(process)


def marked_processes(marker: str, variable: str = MARKER) -> list[int]:
    """Return the ids of processes with the marker in their environment; none where there is no ``/proc``."""
    wanted = f"{variable}={marker}".encode()
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
