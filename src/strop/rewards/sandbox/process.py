"""One sandboxed Python process: start, memory watch, end."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import subprocess
import threading
from collections.abc import Generator
from typing import Any

from strop.process_tree import (
    MARKER,
    adopting_orphans,
    descendants,
    hold_descendants,
    kill_held,
    read_process_file,
)
from strop.rewards.sandbox.bubblewrap import (
    PR_SET_THP_DISABLE,
    Limits,
    memory_file,
    open_filter,
    sandbox_command,
)

_START = """\
import sys
sys.path.insert(0, "/strop")
from guest import {module}
{module}.{function}({descriptor})
"""

_ERROR_BYTES = 1 << 16  # more than a pipe holds
_SHOWN_BYTES = 2000
_SOCKET_BUFFER_BYTES = 212_992  # Linux's default
_FILE_BYTES = 4096  # of the kernel, for an empty file; more than it takes, because removing many takes long


class SandboxedProcess:
    """Run ``function`` of ``guest/MODULE.py`` in a separate sandbox, with ``job`` as its input.

    ``descriptors``, by name, are inherited, and their numbers are part of the job. The process ends with
    ``close``, and with the thread that made it. What is written on standard error before the program runs is
    kept for error texts.
    """

    def __init__(
        self,
        module: str,
        job: dict[str, Any],
        *,
        function: str = "main",
        descriptors: dict[str, int],
        limits: Limits,
    ) -> None:
        self.limits = limits
        self._inside: int | None = None
        job = job | descriptors
        job_file = memory_file(json.dumps(job | {"limits": limits.guest_settings()}).encode())
        filter_file = open_filter()
        self._errors, errors = os.pipe()
        command = sandbox_command(
            ["-c", _START.format(module=module, function=function, descriptor=job_file)],
            limits=limits,
            filter_descriptor=filter_file,
        )
        # A sandboxed program can read the environment that its first process started with: keep it minimal.
        marker = {MARKER: os.environ[MARKER]} if MARKER in os.environ else {}
        try:
            with _without_huge_pages():
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    pass_fds=(job_file, filter_file, *descriptors.values()),
                    env={"PATH": "/usr/bin:/bin"} | marker,
                    cwd="/",
                )
        except BaseException:
            os.close(self._errors)
            raise
        finally:
            for descriptor in (job_file, filter_file, errors):
                os.close(descriptor)

    def exceeds_memory(self) -> bool:
        """Return True if its processes together hold more than ``limits.memory_mb``.

        Polled, because control groups are rarely available: version 2 gives no memory controller to children
        of a group that has processes, such as this program's own.
        """
        if self._inside is None:
            self._inside = next(filter(_is_inside, descendants(self._process.pid)), None)
        held = resident_bytes(self._process.pid)
        if self._inside is not None:
            held += _kernel_bytes(self._inside, disk_bytes=self.limits.file_mb << 20)
        return held > self.limits.memory_mb << 20

    def close(self) -> str:
        """Kill the process and its descendants, wait for them, and return the end of its standard error."""
        with adopting_orphans():
            members = hold_descendants(self._process.pid, stop=True)
            self._process.kill()
            self._process.wait()
            kill_held(members)
        os.set_blocking(self._errors, False)
        with open(self._errors, "rb") as errors:
            return (errors.read(_ERROR_BYTES) or b"")[-_SHOWN_BYTES:].decode(errors="replace").strip()


_switching = threading.Lock()


@contextlib.contextmanager
def _without_huge_pages() -> Generator[None]:
    """Start processes without transparent huge pages, for them and all that they start.

    One small page in use keeps the huge page around it, and counts as small: a program that unmaps the rest
    holds gigabytes. The switch is inherited, and Python cannot set it between fork and exec without a copy of
    this process; here it is set only for that moment.
    """
    control = ctypes.CDLL(None).prctl
    with _switching:
        control(PR_SET_THP_DISABLE, 1, 0, 0, 0)
        try:
            yield
        finally:
            control(PR_SET_THP_DISABLE, 0, 0, 0, 0)


def resident_bytes(root: int) -> int:
    """Return the resident memory of a process and its descendants; shared pages count once per process."""
    pages = 0
    for identity in [root, *descendants(root)]:
        with contextlib.suppress(OSError):  # it has ended
            pages += int(read_process_file(f"{identity}/statm").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _is_inside(identity: int) -> bool:
    """Return True for a process in another process namespace than this one's, so in another network."""
    return _namespaces(identity) > _namespaces(os.getpid())


def _namespaces(identity: int) -> int:
    """Return the number of nested process namespaces of a process; 0 if it has ended."""
    with contextlib.suppress(OSError):
        for line in read_process_file(f"{identity}/status").splitlines():
            if line.startswith(b"NSpid:"):
                return len(line.split()) - 1
    return 0


def _kernel_bytes(identity: int, *, disk_bytes: int) -> int:
    """Return the most that the kernel may hold for a sandbox's sockets and files, given a process in it.

    No limit of a process counts these, and how full a socket is cannot be seen at a low cost: 300 connections
    held 1.6 GB. The contents of ``/tmp`` and ``/dev/shm`` have limits of their own, and the kernel bounds
    pipes to 64 MiB a user.
    """
    held = 0
    with contextlib.suppress(OSError):  # it has ended
        for line in read_process_file(f"{identity}/net/protocols").splitlines()[1:]:
            name, _, sockets, *_ = line.split()
            if sockets != b"0":
                held += int(sockets) * _socket_bytes(name.startswith(b"TCP"))
        for folder in ("tmp", "dev/shm"):
            disk = os.statvfs(f"/proc/{identity}/root/{folder}")
            if disk.f_blocks * disk.f_frsize == disk_bytes:  # else it still has the root folder of the host
                held += (disk.f_files - disk.f_ffree) * _FILE_BYTES
    return held


@functools.cache
def _socket_bytes(is_tcp: bool) -> int:
    """Return the most that the buffers of a socket hold; TCP's grow by themselves."""
    names = ("ipv4/tcp_rmem", "ipv4/tcp_wmem") if is_tcp else ("core/rmem_default", "core/wmem_default")
    most = 0
    for name in names:
        try:
            most += int(read_process_file(f"sys/net/{name}").split()[-1])
        except OSError:  # Linux hides net.core in a container's network
            most += _SOCKET_BUFFER_BYTES
    return most
