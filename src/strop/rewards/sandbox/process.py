"""One sandboxed Python process: its start, its watch, its end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import IO, Any

from strop.rewards.process_tree import MARKER
from strop.rewards.sandbox.bubblewrap import sandbox_command
from strop.rewards.sandbox.cgroups import ControlGroups
from strop.rewards.sandbox.limits import Limits
from strop.rewards.sandbox.seccomp import memory_file, open_filter

_JOIN_GROUPS = 'for f in $GROUPS_TO_JOIN; do echo $$ > "$f/cgroup.procs" || exit 97; done; exec "$@"'
_START = (
    "import sys; sys.path.insert(0, '/strop'); from guest import {module}; {module}.main(int({descriptor}))"
)
_SHOWN_BYTES = 2000
_END_S = 2.0


class SandboxedProcess:
    """``guest/MODULE.py`` in a sandbox of its own, with ``job`` to read.

    It ends with ``close``, and with the thread that made it. What it prints on standard error is kept, in a
    file of limited size, for the words of an error of ours.
    """

    def __init__(
        self,
        module: str,
        job: dict[str, Any],
        *,
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
            ["-c", _START.format(module=module, descriptor=job_file)],
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
        members = [handle for identity in _descendants(self._process.pid) if (handle := _handle(identity))]
        self._process.kill()
        for member in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(member, signal.SIGKILL)
        self._process.wait()
        for member in members:
            select.select([member], [], [], _END_S)  # readable once it is gone
            os.close(member)
        self._groups.remove()
        with self._errors as errors:
            size = errors.seek(0, os.SEEK_END)
            errors.seek(max(0, size - _SHOWN_BYTES))
            return errors.read().decode(errors="replace").strip()


def resident_bytes(root: int) -> int:
    """Memory of a process and its descendants, pages that several of them share counted for each."""
    pages = 0
    for identity in [root, *_descendants(root)]:
        with contextlib.suppress(OSError):  # it ended meanwhile
            pages += int(Path(f"/proc/{identity}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _descendants(root: int) -> list[int]:
    found = [root]
    for identity in found:  # grows while it is walked
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{identity}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found[1:]


def _handle(identity: int) -> int | None:
    """A descriptor of the process, which never means another one; None when it has ended."""
    try:
        return os.pidfd_open(identity)
    except OSError:
        return None
