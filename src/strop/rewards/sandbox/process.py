"""One sandboxed Python process: its start, its watch, its end."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from strop.rewards.process_tree import MARKER, descendants, hold_descendants, kill_held
from strop.rewards.sandbox.bubblewrap import Limits, memory_file, open_filter, sandbox_command

# Limits of memory and processes for a sandbox as a whole, where this program may make control groups.

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


_JOIN_GROUPS = 'for f in $GROUPS_TO_JOIN; do echo $$ > "$f/cgroup.procs" || exit 97; done; exec "$@"'

_START = """\
import sys
sys.path.insert(0, "/strop")
from guest import {module}
{module}.{function}({descriptor})
"""

_SHOWN_BYTES = 2000


class SandboxedProcess:
    """``function`` of ``guest/MODULE.py`` in a separate sandbox, with ``job`` to read.

    It ends with ``close``, and with the thread that made it. What it prints on standard error is kept, in a
    file of limited size, for the words of an error of ours.
    """

    def __init__(
        self,
        module: str,
        job: dict[str, Any],
        *,
        function: str = "main",
        stdin: int,
        stdout: int,
        limits: Limits,
        keep_open: tuple[int, ...] = (),
    ) -> None:
        self.limits = limits
        self._groups = ControlGroups(limits)
        job_file = memory_file(json.dumps(job | {"limits": limits.guest_settings()}).encode())
        filter_file = open_filter()
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - close() closes it
        command = sandbox_command(
            ["-c", _START.format(module=module, function=function, descriptor=job_file)],
            limits=limits,
            filter_descriptor=filter_file,
        )
        try:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _JOIN_GROUPS, "sh", *command],
                stdin=stdin,
                stdout=stdout,
                stderr=self._errors,
                pass_fds=(job_file, filter_file, *keep_open),
                env=self._environment(),
                cwd="/",
            )
        except BaseException:
            self._groups.remove()
            raise
        finally:
            os.close(job_file)
            os.close(filter_file)

    def _environment(self) -> dict[str, str]:
        """Almost nothing: a sandboxed process may read the environment that its first process began with."""
        groups = " ".join(map(str, self._groups.folders))
        marker = {MARKER: os.environ[MARKER]} if MARKER in os.environ else {}
        return {"PATH": "/usr/bin:/bin", "GROUPS_TO_JOIN": groups} | marker

    def exceeds_memory(self) -> bool:
        """Whether its processes hold too much; where control groups see to that, nothing is looked at."""
        if self._groups.limits_memory:
            return False
        return resident_bytes(self._process.pid) > self.limits.memory_mb << 20

    def close(self) -> str:
        """Kill it and all that it started; returns when they are gone, with the end of what it printed."""
        members = hold_descendants(self._process.pid)
        self._process.kill()
        kill_held(members)
        self._process.wait()
        self._groups.remove()
        with self._errors as errors:
            size = errors.seek(0, os.SEEK_END)
            errors.seek(max(0, size - _SHOWN_BYTES))
            return errors.read().decode(errors="replace").strip()


def resident_bytes(root: int) -> int:
    """Memory of a process and its descendants, pages that several of them share counted for each."""
    pages = 0
    for identity in [root, *descendants(root)]:
        with contextlib.suppress(OSError):  # it ended meanwhile
            pages += int(Path(f"/proc/{identity}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
