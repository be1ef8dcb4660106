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
import secrets
import shutil
import sys
import sysconfig
from pathlib import Path

from strop.errors import ConfigError
from strop.rewards.sandbox.limits import Limits

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
