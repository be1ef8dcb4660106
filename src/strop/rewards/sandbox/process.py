"""One sandboxed Python process: its start, its watch, its end."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import IO, Any

from strop.rewards.process_tree import MARKER, descendants, hold_descendants, kill_held
from strop.rewards.sandbox.bubblewrap import sandbox_command
from strop.rewards.sandbox.cgroups import ControlGroups
from strop.rewards.sandbox.limits import Limits
from strop.rewards.sandbox.seccomp import memory_file, open_filter

_JOIN_GROUPS = 'for f in $GROUPS_TO_JOIN; do echo $$ > "$f/cgroup.procs" || exit 97; done; exec "$@"'
_START = (
    "import sys; sys.path.insert(0, '/strop'); from guest import {module}; {module}.main(int({descriptor}))"
)
_SHOWN_BYTES = 2000


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
