"""The command line that starts Python in a sandbox, its limits, and its filter of system calls.

Inside: a read-only file system of shared libraries, the interpreter with its standard library (no installed
packages) and ``/strop/guest``; small memory disks in ``/tmp`` and ``/dev/shm``; no network, no other
processes, no user but ``nobody``, no capabilities, no further namespaces, and a filter of system calls.

As root, a sandbox takes two steps. The kernel does not apply the limit of processes to root's real user id,
which a user namespace of root maps to: a fork bomb would be unbounded. So an outer bubblewrap, which can read
files that only root can, mounts them; then setpriv changes to an unprivileged user id, under which the inner
bubblewrap makes the sandbox.
"""

from __future__ import annotations

import ctypes
import functools
import os
import secrets
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from strop.errors import ConfigError


@dataclass(frozen=True)
class Limits:
    """Bounds of one sandbox: for all processes in it together, unless a line says "per process"."""

    wall_s: float = 6.0
    """From the start of the sandbox; below a reward function's deadline, so that this one comes first."""
    memory_mb: int = 512
    """Resident memory of all processes, and address space per process."""
    processes: int = 24
    """Processes and threads."""
    file_mb: int = 16
    """Size of a file; also the size of ``/tmp`` and of ``/dev/shm``."""
    open_files: int = 64
    """Per process."""
    output_bytes: int = 4 << 20
    """Size of an answer to the tests, or of a program's standard output."""

    def guest_settings(self) -> dict[str, float]:
        """Return the limits that the trusted start code sets inside the sandbox, irrevocably."""
        return {
            "cpu_s": max(1, int(self.wall_s + 1)),
            "memory_bytes": self.memory_mb << 20,
            "processes": self.processes,
            "file_bytes": self.file_mb << 20,
            "open_files": self.open_files,
            "output_bytes": self.output_bytes,
        }


GUEST_FOLDER = Path(__file__).parent / "guest"
_NOBODY = "65534"
_FREE_IDS = range(61184, 65520)  # systemd's range for transient users, present in containers too
_STAGE = "/stage"
_LIBRARY_FOLDERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")


@functools.cache
def require_bubblewrap() -> str:
    """Return the path of the program ``bwrap``.

    Raises:
        ConfigError: it, or what it needs beside it, is not installed, or this is not Linux.
    """
    path = shutil.which("bwrap")
    if sys.platform != "linux" or path is None:
        raise ConfigError(
            "scoring code runs programs that a model wrote, which needs bubblewrap on Linux; no program "
            f"'bwrap' on {sys.platform} in PATH={os.environ.get('PATH', '')!r}. Install it with: "
            "apt-get install bubblewrap (programs are never run without it)"
        )
    if os.getuid() == 0 and shutil.which("setpriv") is None:
        raise ConfigError(
            "scoring code as root needs the program 'setpriv' to give up root's rights. Install it with: "
            "apt-get install util-linux, or run as another user"
        )
    filter_program()
    return path


def sandbox_command(arguments: list[str], *, limits: Limits, filter_descriptor: int) -> list[str]:
    """Return the command that runs ``python ARGUMENTS`` in a sandbox.

    ``filter_descriptor`` is an inherited file with the filter of system calls. Other inherited descriptors
    stay open inside.
    """
    mounts = _read_only_mounts()
    if os.getuid() != 0:
        return _inner(mounts, arguments, limits=limits, filter_descriptor=filter_descriptor)
    staged = {f"{_STAGE}/{number}": source for number, source in enumerate(mounts.values())}
    inner_mounts = dict(zip(mounts, staged, strict=True))
    inner = _inner(inner_mounts, arguments, limits=limits, filter_descriptor=filter_descriptor)
    return [*_outer(staged), *inner]


def _outer(staged: dict[str, str]) -> list[str]:
    """Return the outer command, as root: mount what may be readable by root only, then drop privileges."""
    identity = str(_FREE_IDS[secrets.randbelow(len(_FREE_IDS))])
    command = [require_bubblewrap(), "--die-with-parent"]
    for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_KILL"):
        command += ["--cap-add", capability]
    command += ["--bind", "/proc", "/proc", "--dev", "/dev", "--perms", "1777", "--dir", "/tmp"]
    command += ["--ro-bind", "/usr", "/usr", *_links(("/bin", "/sbin", "/lib", "/lib64"))]
    command += ["--perms", "0755", "--dir", _STAGE]
    for target, source in staged.items():
        command += ["--ro-bind", source, target]
    # bwrap keeps no capability, so its death would not kill a process of another user. The shell in between
    # keeps CAP_KILL: it dies with bwrap, and its child dies with it.
    command += ["--", "/usr/bin/sh", "-c", '"$@"; exit $?', "sh"]
    setpriv = shutil.which("setpriv") or "setpriv"
    return [*command, setpriv, "--reuid", identity, "--regid", identity, "--clear-groups", "--"]


def _inner(
    mounts: dict[str, str], arguments: list[str], *, limits: Limits, filter_descriptor: int
) -> list[str]:
    disk = ["--size", str(limits.file_mb << 20), "--tmpfs"]
    command = [require_bubblewrap(), "--unshare-all", "--unshare-user", "--disable-userns"]
    command += ["--uid", _NOBODY, "--gid", _NOBODY, "--hostname", "sandbox"]
    command += ["--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    for target, source in mounts.items():
        command += ["--ro-bind", source, target]
    command += _links(_LIBRARY_FOLDERS)
    for folder in _package_folders():  # after the mounts, which contain them
        command += ["--tmpfs", folder, "--remount-ro", folder]
    command += ["--proc", "/proc", "--dev", "/dev", *disk, "/dev/shm", "--remount-ro", "/dev"]
    command += [*disk, "/tmp", "--chdir", "/tmp", "--remount-ro", "/"]
    command += ["--seccomp", str(filter_descriptor)]
    return [*command, "--", _interpreter(), "-I", "-S", *arguments]


@functools.cache
def _read_only_mounts() -> dict[str, str]:
    """Return the read-only mounts, target -> source, ordered so that none shadows an earlier one."""
    mounts = {
        folder: folder for folder in _LIBRARY_FOLDERS if os.path.isdir(folder) and not os.path.islink(folder)
    }
    libraries = os.path.join(sys.base_prefix, "lib")
    wanted = [libraries, *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}, _interpreter()]
    for path in wanted:
        if not any(path == known or path.startswith(known + "/") for known in mounts):
            mounts[path] = path
    if os.path.isfile("/etc/ld.so.cache"):
        mounts["/etc/ld.so.cache"] = "/etc/ld.so.cache"
    mounts["/strop/guest"] = str(GUEST_FOLDER)
    return mounts


def _links(folders: tuple[str, ...]) -> list[str]:
    linked = [path for path in folders if os.path.islink(path)]
    return [word for path in linked for word in ("--symlink", os.readlink(path), path)]


def _interpreter() -> str:
    """Return the path of the interpreter itself, not of a virtual environment's link to it."""
    return os.path.realpath(sys.executable)


@functools.cache
def _package_folders() -> list[str]:
    """Return the folders of installed packages inside the standard library's, to be hidden."""
    standard = Path(sysconfig.get_path("stdlib"))
    return [str(path) for name in ("site-packages", "dist-packages") if (path := standard / name).is_dir()]


# They create memory that neither RLIMIT_AS nor the memory watch counts (memfd_create, shmget), reach other
# processes or namespaces, or widen the kernel's attack surface. No honest solution needs one.
_REFUSED_CALLS = [
    "add_key", "bpf", "finit_module", "fsmount", "fsopen", "init_module", "io_setup", "io_uring_enter",
    "io_uring_register", "io_uring_setup", "kexec_file_load", "kexec_load", "keyctl", "memfd_create",
    "memfd_secret", "mount", "mount_setattr", "move_mount", "mq_open", "msgget", "name_to_handle_at",
    "open_by_handle_at", "open_tree", "perf_event_open", "pivot_root", "process_vm_readv",
    "process_vm_writev", "ptrace", "quotactl", "request_key", "semget", "setns", "shmat", "shmctl",
    "shmget", "swapon", "umount2", "unshare", "userfaultfd",
]  # fmt: skip
_LIBSECCOMP = "libseccomp.so.2"
_ALLOW, _EPERM = 0x7FFF0000, 0x00050001  # SCMP_ACT_ALLOW, SCMP_ACT_ERRNO(EPERM)


@functools.cache
def filter_program() -> bytes:
    """Return a filter as an array of ``struct sock_filter``: EPERM for the refused calls.

    libseccomp compiles it for this machine's architecture; calls of another one (x32, 32-bit) kill.

    Raises:
        ConfigError: libseccomp is not installed, or too old to have all names.
    """
    needed = f"scoring code needs {_LIBSECCOMP} 2.5.2 or later: apt-get install libseccomp2"
    try:
        library = ctypes.CDLL(_LIBSECCOMP)
    except OSError as error:
        raise ConfigError(f"{needed} ({error})") from error
    library.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ALLOW)))
    try:
        for name in _REFUSED_CALLS:
            number = library.seccomp_syscall_resolve_name(name.encode())
            if number == -1 or library.seccomp_rule_add_array(
                rules, ctypes.c_uint32(_EPERM), number, 0, None
            ):
                raise ConfigError(f"{needed}; this version does not know the system call {name}")
        descriptor = memory_file(b"")
        with open(descriptor, "rb") as program:
            if library.seccomp_export_bpf(rules, descriptor):
                raise ConfigError(f"{_LIBSECCOMP} cannot make a filter of system calls for this machine")
            program.seek(0)
            return program.read()
    finally:
        library.seccomp_release(rules)


def open_filter() -> int:
    """Return a descriptor of a file with the filter, at its start."""
    return memory_file(filter_program())


def memory_file(content: bytes) -> int:
    """Return a descriptor of an anonymous file with this content, at its start."""
    descriptor = os.memfd_create("strop-sandbox")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
