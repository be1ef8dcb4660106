"""One sandboxed Python process: start, memory watch, end."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import IO, Any

from strop.rewards.process_tree import MARKER, descendants, hold_descendants, kill_held
from strop.rewards.sandbox.bubblewrap import Limits, memory_file, open_filter, sandbox_command

_START = """\
import sys
sys.path.insert(0, "/strop")
from guest import {module}
{module}.{function}({descriptor})
"""

_SHOWN_BYTES = 2000


class SandboxedProcess:
    """Run ``function`` of ``guest/MODULE.py`` in a separate sandbox, with ``job`` as its input.

    The process ends with ``close``, and with the thread that made it. Its standard error is kept, up to the
    limit of a file, for error texts.
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
        job_file = memory_file(json.dumps(job | {"limits": limits.guest_settings()}).encode())
        filter_file = open_filter()
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - close() closes it
        command = sandbox_command(
            ["-c", _START.format(module=module, function=function, descriptor=job_file)],
            limits=limits,
            filter_descriptor=filter_file,
        )
        # A sandboxed program can read the environment that its first process started with: keep it minimal.
        marker = {MARKER: os.environ[MARKER]} if MARKER in os.environ else {}
        try:
            self._process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=stdout,
                stderr=self._errors,
                pass_fds=(job_file, filter_file, *keep_open),
                env={"PATH": "/usr/bin:/bin"} | marker,
                cwd="/",
            )
        finally:
            os.close(job_file)
            os.close(filter_file)

    def exceeds_memory(self) -> bool:
        """Return True if its processes together hold more than ``limits.memory_mb``.

        Polled, because control groups are rarely available: version 2 gives no memory controller to children
        of a group that has processes, such as this program's own.
        """
        return resident_bytes(self._process.pid) > self.limits.memory_mb << 20

    def close(self) -> str:
        """Kill the process and its descendants, wait for them, and return the end of its standard error."""
        members = hold_descendants(self._process.pid)
        self._process.kill()
        kill_held(members)
        self._process.wait()
        with self._errors as errors:
            size = errors.seek(0, os.SEEK_END)
            errors.seek(max(0, size - _SHOWN_BYTES))
            return errors.read().decode(errors="replace").strip()


def resident_bytes(root: int) -> int:
    """Return the resident memory of a process and its descendants; shared pages count once per process."""
    pages = 0
    for identity in [root, *descendants(root)]:
        with contextlib.suppress(OSError):  # it has ended
            pages += int(Path(f"/proc/{identity}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
