"""The command line that starts Python in a sandbox.

Inside: a read-only file system of shared libraries, the interpreter with its standard library (no installed
packages) and ``/strop/guest``; small memory disks in ``/tmp`` and ``/dev/shm``; no network, no other
processes, no user but ``nobody``, no capabilities, no further namespaces, and a filter of system calls.

Root needs two steps. Started by root, a sandbox would be run by root's real user id behind its mapped one, to
whom the kernel applies no limit of processes. So an outer bubblewrap, which may read what only root can, lays
out the files, a user id without rights is taken on, and with it bubblewrap makes the sandbox.
"""

from __future__ import annotations

import functools
import os
import platform
import secrets
import shutil
import struct
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from strop.errors import ConfigError

# What a sandboxed program may use.


@dataclass(frozen=True)
class Limits:
    """Bounds of one sandbox; all processes in it together, unless a line says "each"."""

    wall_s: float = 6.0
    """From the start of the sandbox; below a reward function's deadline, so that this one comes first."""
    memory_mb: int = 512
    """Of all processes together, and also the address space of each."""
    processes: int = 24
    """Processes and threads."""
    file_mb: int = 16
    """The size of a file, each; ``/tmp`` and ``/dev/shm`` hold as much in all."""
    open_files: int = 64
    """Each process."""
    output_bytes: int = 4 << 20
    """Of an answer to the tests, or of one program's standard output."""

    def guest_settings(self) -> dict[str, float]:
        """What the trusted start of a sandboxed process sets for itself, for good."""
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


_FREE_IDS = range(61184, 65520)  # set aside for processes without an account, and present in containers too


_STAGE = "/stage"


_LIBRARY_FOLDERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")


@functools.cache
def require_bubblewrap() -> str:
    """The path of the program ``bwrap``.

    Raises:
        ConfigError: it is not installed, or this is not Linux.
    """
    path = shutil.which("bwrap")
    if sys.platform != "linux" or path is None:
        raise ConfigError(
            "scoring code runs programs of a model, which needs bubblewrap on Linux; the program 'bwrap' was "
            f"not found on {sys.platform} in PATH={os.environ.get('PATH', '')!r}. Install it with: "
            "apt-get install bubblewrap (there is no way to run them without it)"
        )
    if os.getuid() == 0 and shutil.which("setpriv") is None:
        raise ConfigError(
            "scoring code as root needs the program 'setpriv' to give up root's rights. Install it with: "
            "apt-get install util-linux, or run as another user"
        )
    return path


def sandbox_command(arguments: list[str], *, limits: Limits, filter_descriptor: int) -> list[str]:
    """The command that runs ``python ARGUMENTS`` in a sandbox.

    ``filter_descriptor`` is an inherited file with the filter of system calls. Other inherited descriptors
    stay open inside.
    """
    places = _read_only_places()
    if os.getuid() != 0:
        return _inner(places, arguments, limits=limits, filter_descriptor=filter_descriptor)
    staged = {f"{_STAGE}/{number}": source for number, source in enumerate(places.values())}
    inner_places = dict(zip(places, staged, strict=True))
    inner = _inner(inner_places, arguments, limits=limits, filter_descriptor=filter_descriptor)
    return [*_outer(staged), *inner]


def _outer(staged: dict[str, str]) -> list[str]:
    """The step as root: places that may be readable to root alone, shown to an id without rights."""
    identity = str(_FREE_IDS[secrets.randbelow(len(_FREE_IDS))])
    command = [require_bubblewrap(), "--die-with-parent"]
    for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_KILL"):
        command += ["--cap-add", capability]
    command += ["--bind", "/proc", "/proc", "--dev", "/dev", "--perms", "1777", "--dir", "/tmp"]
    command += ["--ro-bind", "/usr", "/usr", *_links(("/bin", "/sbin", "/lib", "/lib64"))]
    command += ["--perms", "0755", "--dir", _STAGE]
    for place, source in staged.items():
        command += ["--ro-bind", source, place]
    # bwrap keeps no rights for itself, and so its death would not end a process of another user. The shell
    # keeps CAP_KILL, and stands between: it ends with bwrap, and what it started ends with the shell.
    command += ["--", "/usr/bin/sh", "-c", '"$@"; exit $?', "sh"]
    setpriv = shutil.which("setpriv") or "setpriv"
    return [*command, setpriv, "--reuid", identity, "--regid", identity, "--clear-groups", "--"]


def _inner(
    places: dict[str, str], arguments: list[str], *, limits: Limits, filter_descriptor: int
) -> list[str]:
    disk = ["--size", str(limits.file_mb << 20), "--tmpfs"]
    command = [require_bubblewrap(), "--unshare-all", "--unshare-user", "--disable-userns"]
    command += ["--uid", _NOBODY, "--gid", _NOBODY, "--hostname", "sandbox"]
    command += ["--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    for place, source in places.items():
        command += ["--ro-bind", source, place]
    command += _links(_LIBRARY_FOLDERS)
    for folder in _package_folders():  # after the places, which hold them
        command += ["--tmpfs", folder, "--remount-ro", folder]
    command += ["--proc", "/proc", "--dev", "/dev", *disk, "/dev/shm", "--remount-ro", "/dev"]
    command += [*disk, "/tmp", "--chdir", "/tmp", "--remount-ro", "/"]
    command += ["--seccomp", str(filter_descriptor)]
    return [*command, "--", _interpreter(), "-I", "-S", *arguments]


@functools.cache
def _read_only_places() -> dict[str, str]:
    """Where what is seen inside, in an order in which nothing hides what came before: place -> source."""
    places = {folder: folder for folder in _LIBRARY_FOLDERS if os.path.isdir(folder) and not _is_link(folder)}
    libraries = os.path.join(sys.base_prefix, "lib")
    wanted = [libraries, *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}, _interpreter()]
    for path in wanted:
        if not any(path == known or path.startswith(known + "/") for known in places):
            places[path] = path
    if os.path.isfile("/etc/ld.so.cache"):
        places["/etc/ld.so.cache"] = "/etc/ld.so.cache"
    places["/strop/guest"] = str(GUEST_FOLDER)
    return places


def _links(folders: tuple[str, ...]) -> list[str]:
    return [word for path in folders if _is_link(path) for word in ("--symlink", os.readlink(path), path)]


def _is_link(path: str) -> bool:
    return os.path.islink(path)


def _interpreter() -> str:
    """The interpreter itself, not a virtual environment's link to it."""
    return os.path.realpath(sys.executable)


@functools.cache
def _package_folders() -> list[str]:
    """Installed packages beside the standard library: none of them is a program's business."""
    standard = Path(sysconfig.get_path("stdlib"))
    return [str(path) for name in ("site-packages", "dist-packages") if (path := standard / name).is_dir()]


# A filter of system calls: what no program needs and what evades the limits of a sandbox is refused.

# Numbers as in linux/arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
_REFUSED = {
    "x86_64": {
        "shmget": 29, "shmat": 30, "shmctl": 31, "semget": 64, "msgget": 68, "ptrace": 101, "pivot_root": 155,
        "mount": 165, "umount2": 166, "swapon": 167, "init_module": 175, "quotactl": 179, "io_setup": 206,
        "mq_open": 240, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272,
        "perf_event_open": 298, "name_to_handle_at": 303, "open_by_handle_at": 304, "setns": 308,
        "process_vm_readv": 310, "process_vm_writev": 311, "finit_module": 313, "memfd_create": 319,
        "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425, "io_uring_enter": 426,
        "io_uring_register": 427, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsmount": 432,
        "mount_setattr": 442, "memfd_secret": 447,
    },
    "aarch64": {
        "io_setup": 0, "umount2": 39, "mount": 40, "pivot_root": 41, "quotactl": 60, "unshare": 97,
        "kexec_load": 104, "init_module": 105, "ptrace": 117, "mq_open": 180, "msgget": 186, "semget": 190,
        "shmget": 194, "shmctl": 195, "shmat": 196, "add_key": 217, "request_key": 218, "keyctl": 219,
        "swapon": 224, "perf_event_open": 241, "name_to_handle_at": 264, "open_by_handle_at": 265,
        "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "finit_module": 273,
        "memfd_create": 279, "bpf": 280, "userfaultfd": 282, "kexec_file_load": 294, "io_uring_setup": 425,
        "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429, "fsopen": 430,
        "fsmount": 432, "mount_setattr": 442, "memfd_secret": 447,
    },
}  # fmt: skip


_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_* of linux/audit.h


_X32_CALLS = 0x40000000  # a second table of the same calls on x86-64


_LOAD_WORD, _JUMP_IF_EQUAL, _JUMP_IF_GREATER_OR_EQUAL, _RETURN = 0x20, 0x15, 0x35, 0x06


_NUMBER_OFFSET, _ARCHITECTURE_OFFSET = 0, 4  # in struct seccomp_data


_ALLOW, _KILL, _EPERM = 0x7FFF0000, 0x80000000, 0x00050001


@functools.cache
def filter_program() -> bytes:
    """The filter for this machine, as an array of ``struct sock_filter``.

    Raises ``ConfigError`` on a machine whose system calls are not known here.
    """
    machine = platform.machine()
    if machine not in _REFUSED:
        raise ConfigError(
            f"the sandbox for code knows the system calls of {', '.join(_REFUSED)}; this machine is {machine}"
        )
    refused = sorted(_REFUSED[machine].values())
    lines = [
        (_LOAD_WORD, 0, 0, _ARCHITECTURE_OFFSET),
        (_JUMP_IF_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD_WORD, 0, 0, _NUMBER_OFFSET),
        (_JUMP_IF_GREATER_OR_EQUAL, len(refused) + 1, 0, _X32_CALLS),
    ]
    lines += [(_JUMP_IF_EQUAL, len(refused) - index, 0, number) for index, number in enumerate(refused)]
    lines += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _EPERM)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def open_filter() -> int:
    """A descriptor that holds the filter, at its start."""
    return memory_file(filter_program())


def memory_file(content: bytes) -> int:
    """A descriptor of a nameless file with this content, at its start."""
    descriptor = os.memfd_create("strop-sandbox")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
