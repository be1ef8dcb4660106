"""Limits of memory and processes for a sandbox as a whole, where this program may make control groups."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from strop.rewards.sandbox.limits import Limits

_PREFIX = "strop-sandbox-"
_END_S = 2.0
_numbers = itertools.count()


class ControlGroups:
    """The groups of one sandbox; ``folders`` is empty where none can be made.

    A process joins by writing its id to ``cgroup.procs`` of each. ``limits_memory``: whether one does.
    """

    def __init__(self, limits: Limits) -> None:
        settings = {
            "memory.limit_in_bytes": limits.memory_mb << 20,  # version 1
            "memory.max": limits.memory_mb << 20,  # version 2
            "memory.swap.max": 0,
            "pids.max": limits.processes + 8,  # bubblewrap's own are in there too
        }
        self.folders: list[Path] = []
        self.limits_memory = False
        name = f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        for parent in _parents():
            _remove_abandoned(parent)
            with contextlib.suppress(OSError):  # not ours to write, or mounted read-only
                (parent / name).mkdir()
                written = [key for key in settings if _write(parent / name / key, settings[key])]
                if not written:
                    (parent / name).rmdir()
                    continue
                self.folders.append(parent / name)
                self.limits_memory |= any(key.startswith("memory.") for key in written)

    def remove(self) -> None:
        """Wait for the last of the killed processes to go, and remove the groups."""
        _remove(self.folders)


def remove_groups_of(process_id: int) -> None:
    """Remove the groups of a process that was killed before it could, when its sandboxes are ending too."""
    _remove(folder for parent in _parents() for folder in parent.glob(f"{_PREFIX}{process_id}-*"))


def _remove(folders: Iterable[Path]) -> None:
    deadline = time.monotonic() + _END_S
    for folder in folders:
        while not _removed(folder) and time.monotonic() < deadline:
            time.sleep(0.002)


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:  # busy: a process in it is on its way out
        return False
    return True


def _write(path: Path, value: int) -> bool:
    """Whether there is such a setting and it could be written."""
    if not path.exists():
        return False
    try:
        path.write_text(str(value))
    except OSError:
        return False
    return True


def _parents() -> Iterator[Path]:
    """Where groups with limits of memory or processes may be made below this process's own."""
    own = {}
    listing = Path("/proc/self/cgroup")
    for line in listing.read_text().splitlines() if listing.is_file() else ():
        _, controllers, path = line.split(":", 2)
        own[controllers] = path.lstrip("/")
    if "" in own:  # version 2: what a group's children may limit is listed
        group = Path("/sys/fs/cgroup") / own[""]
        with contextlib.suppress(OSError):
            listed = (group / "cgroup.subtree_control").read_text().split()
            if {"memory", "pids"} & set(listed):
                yield group
    for controller in ("memory", "pids"):  # version 1: one hierarchy each
        group = Path("/sys/fs/cgroup") / controller / own.get(controller, "")
        if controller in own and group.is_dir():
            yield group


def _remove_abandoned(parent: Path) -> None:
    """Remove groups of programs that were killed before they could."""
    for folder in parent.glob(f"{_PREFIX}*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if not Path(f"/proc/{owner}").exists():
            with contextlib.suppress(OSError):
                folder.rmdir()
