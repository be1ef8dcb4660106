"""Servers of the run, each with a guard: ``python -m strop.rollout.http.start FOLDER COMMAND...``.

The guard's standard input is a pipe from the run, which closes when the run ends, however it does. vLLM's
engine is a child of the server that outlives it, and killed processes leave names in /dev/shm. A child of the
guard does its work if it is killed: Ray kills the children of a worker that it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import strop
from strop.process_tree import (
    MARKER,
    become_subreaper,
    descendants,
    kill_descendants,
    kill_marked,
    marked_processes,
    read_process_file,
)

_PR_SET_PDEATHSIG = 1
LOOK_S = 1.0
_LINES, _ERRORS, _END_S = 15, 3, 20.0
_ERROR = re.compile(r"\b\w*(Error|Exception): .*")
_TRAINERS = ("VLLM_", "MASTER_", "RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "TORCHELASTIC_")
"""Beginnings of variables that are meant for the run's own process."""


def command(arguments: Mapping[str, Any], more: Sequence[str]) -> list[str]:
    """Return vLLM's command for the arguments of an engine."""
    line = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            line += [f"--{option}" if value else f"--no-{option}"]
        else:
            line += [f"--{option}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return [*line, *more]


def environment(token: str, folder: Path, marker: str) -> dict[str, str]:
    """Return the variables of a server: the run's, without its vLLM, its ranks and its proxies."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_TRAINERS) and not name.lower().endswith("_proxy")
    }
    paths = [str(Path(strop.__file__).parents[1]), os.environ.get("PYTHONPATH")]
    return kept | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "STROP_TOKEN": token,
        MARKER: marker,
        "TMPDIR": str(folder),
        "VLLM_RPC_BASE_PATH": str(folder),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


class OwnServer:
    """A server of the run on a socket of the file system: no port can be taken, or found by others."""

    def __init__(self, command: Sequence[str], token: str, log: Path) -> None:
        """Start it; ``log`` gets its output."""
        self._command, self._token, self._log = command, token, log
        self._marker = uuid.uuid4().hex
        self._folder = Path(tempfile.mkdtemp(prefix="strop-http-"))  # short: a socket's path has 107 bytes
        self.url = f"unix:{self._folder}/server.sock"
        self.start()

    def start(self) -> None:
        """Start it, also again after ``stop``."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        guard = [sys.executable, "-P", "-m", __name__, str(self._folder)]
        with self._log.open("wb") as log:
            self._guard = subprocess.Popen(
                [*guard, *self._command, "--uds", self.url.removeprefix("unix:")],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment(self._token, self._folder, self._marker),
                start_new_session=True,  # Ctrl-C in a terminal is meant for the run
            )

    @property
    def has_ended(self) -> bool:
        return self._guard.poll() is not None

    def last_lines(self) -> str:
        """Return the first errors that its log names, and its end."""
        with contextlib.suppress(OSError):
            lines = self._log.read_text(errors="replace").splitlines()
            # the end of vLLM's log is where its other processes notice that one has died of them
            errors = dict.fromkeys(found[0] for line in lines if (found := _ERROR.search(line)))
            return "\n".join([*itertools.islice(errors, _ERRORS), *lines[-_LINES:]])
        return ""

    def stop(self) -> None:
        """End all of its processes, and what a guard that was killed has left."""
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):
            self._guard.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(_END_S)
        _end_marked(self._marker, self._folder)


def shared_names(processes: Iterable[int]) -> set[str]:
    """Return the files below /dev/shm that processes have mapped."""
    names: set[str] = set()
    for process in processes:
        with contextlib.suppress(OSError):
            names.update(re.findall(r"(/dev/shm/\S+)$", read_process_file(f"{process}/maps").decode(), re.M))
    return names


def _end_marked(marker: str, folder: str | Path) -> None:
    """Kill the processes with the marker, but for this one; delete ``folder`` and their shared memory."""
    names = shared_names(marked_processes(marker))
    kill_marked(marker)
    _delete(names, folder)


def _delete(names: Iterable[str], folder: str | Path) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(name)
    shutil.rmtree(folder, ignore_errors=True)


def _guard(folder: str, command: list[str]) -> None:
    """Run ``command``; then kill its processes, and delete ``folder`` and their shared memory."""
    control, own_id, names = ctypes.CDLL(None).prctl, os.getpid(), set[str]()
    become_subreaper()  # of what the server leaves
    if os.fork() == 0:
        _outlive(own_id, folder)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: control(_PR_SET_PDEATHSIG, signal.SIGKILL),
    )
    try:
        while server.poll() is None and not select.select([0], [], [], LOOK_S)[0]:
            names |= shared_names(descendants(own_id))
    finally:
        names |= shared_names(descendants(own_id))
        kill_descendants(own_id)
        _delete(names, folder)


def _outlive(guard: int, folder: str) -> NoReturn:
    """Wait for the guard's end; if it was killed, as by Ray with its worker, do what it would have done."""
    while os.getppid() == guard:  # which ends this process with all others
        time.sleep(LOOK_S)
    _end_marked(os.environ[MARKER], folder)
    os._exit(0)


if __name__ == "__main__":
    _guard(sys.argv[1], sys.argv[2:])
