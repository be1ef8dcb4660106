"""The private Ray cluster of a run, which a separate process, the keeper, starts and ends.

In the driver, a raylet or GCS that dies while Ray starts would block ``ray.init`` for a minute, and then Ray
may exit the process; a keeper is replaced. And when a driver is killed, Ray's agents would search for the
head for a minute and hold their memory meanwhile; the keeper ends them. It runs as ``python -m
strop.controller.ray.private CPUS FOLDER``; its standard input is a pipe that closes when the driver ends.

The cluster listens on the loopback interface only, and requires a token that only this user can read.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import random
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import psutil
import ray

from strop.controller.ray.ray_private import Node, RayParams, authentication, ray_constants
from strop.errors import WorkerError
from strop.process_tree import become_subreaper, kill_descendants

_PARTS = ("gcs_server", "raylet")
_LOST = "lost "
_CONNECTED = b"connected"
_INTERVAL_S = 0.2
_START_S = 300.0
_END_S = 3.0
_LINES = 10
_ENVIRONMENT = {
    ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_agent_register_timeout_ms": str(int(1000 * _START_S)),
}
"""The first makes Ray listen on the loopback interface only, on Linux too; the second is ``ray.init``'s; the
third is the time that an agent may take to answer, 30 s otherwise."""
_FIRST_PORT, _LAST_PORT = 10_000, 1 << 16
_LISTEN_PORT = "dashboard_agent_listen_port"
_PORTS = ("metrics_agent_port", "metrics_export_port", "runtime_env_agent_port", _LISTEN_PORT)


class PrivateCluster:
    """A Ray cluster on this machine, which ends with this process at the latest.

    Args:
        cpus: the number of processes, each with one CPU, that it has room for.

    Raises:
        WorkerError: Ray did not start; another attempt may succeed.
    """

    def __init__(self, cpus: int) -> None:
        folder = _folder()
        self._log = folder / "log"
        console = os.dup(2)
        with self._log.open("wb") as log, os.fdopen(console, "wb"):
            self._keeper = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(cpus), str(folder), str(console)],
                bufsize=0,  # ``select`` does not see what a buffer holds
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=[console],
                env=os.environ | _ENVIRONMENT,
                start_new_session=True,  # Ctrl-C in a terminal is meant for the driver
            )
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._stdin, self._stdout = self._keeper.stdin, self._keeper.stdout
        try:
            self.address = self._read_line(_START_S)
        except BaseException:
            self.stop()
            raise

    def connect(self) -> None:
        """Call ``ray.init``; raises ``WorkerError`` if Ray dies meanwhile.

        For a fraction of a second in ``ray.init``, the death of the raylet ends this process in native code,
        with status 1; then the keeper reports the cause.
        """
        errors: list[Exception] = []

        def connect() -> None:
            try:
                ray.init(address=self.address, logging_level=logging.ERROR, log_to_driver=True)
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)

        ray_constants.ENABLE_RAY_CLUSTER = False  # the switch of ``_ENVIRONMENT`` in this process
        thread = threading.Thread(target=connect, daemon=True)  # abandoned if Ray dies
        thread.start()
        try:
            while thread.is_alive():
                thread.join(_INTERVAL_S)
                if thread.is_alive() and self._has_line(0):
                    self._read_line(0)
        finally:
            ray_constants.ENABLE_RAY_CLUSTER = True
        if errors:
            raise WorkerError(f"cannot connect to the Ray cluster that this run started: {errors[0]}")
        with contextlib.suppress(OSError):  # the keeper was killed
            self._stdin.write(_CONNECTED)

    def stop(self) -> None:
        """End all processes of the cluster."""
        with contextlib.suppress(OSError):
            self._stdin.close()
        try:
            self._keeper.wait(_END_S)
        except subprocess.TimeoutExpired:  # native code of Ray holds its interpreter
            kill_descendants(self._keeper.pid)
            self._keeper.kill()
            self._keeper.wait()

    def _has_line(self, timeout_s: float) -> bool:
        return bool(select.select([self._stdout], [], [], timeout_s)[0])

    def _read_line(self, timeout_s: float) -> str:
        """Return the address from the keeper; raise ``WorkerError`` if Ray died instead."""
        deadline, lost = time.monotonic() + timeout_s, None
        while not (arrived := self._has_line(_INTERVAL_S)) and time.monotonic() < deadline and lost is None:
            lost = self._unnoticed_loss()
        if lost:
            cause = f"its process {lost} died"
        elif not arrived:
            cause = f"it was not ready after {timeout_s:.0f} s"
        elif not (line := self._stdout.readline().decode().strip()):
            cause = "the process that starts it failed"
        elif line.startswith(_LOST):
            cause = f"its process {line.removeprefix(_LOST)} died"
        else:
            return line
        output = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        raise WorkerError("\n".join([_not_started(cause), *output[-_LINES:]]))

    def _unnoticed_loss(self) -> str | None:
        """Return name and process id of a dead part, also while the keeper is stuck in native code of Ray."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self._keeper.pid).children():
                if child.name() in _PARTS and child.status() == psutil.STATUS_ZOMBIE:
                    return f"{child.name()} (pid {child.pid})"
        return None


def _not_started(cause: str) -> str:
    return f"Ray did not start on this machine: {cause}; see /tmp/ray/session_latest/logs"


@functools.cache
def _folder() -> Path:
    """Return a folder of this process, with the token of its clusters unless the user names one.

    Ray itself would write a token into the home folder, and later clusters of the user would require it.
    """
    folder = Path(tempfile.mkdtemp(prefix="strop-ray-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if not any(os.environ.get(f"RAY_AUTH_{name}") for name in ("TOKEN", "TOKEN_PATH")):
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
    logging.getLogger(authentication.__name__).setLevel(logging.ERROR)  # advice on how to disable it
    authentication.enable_token_auth_by_default()  # RAY_AUTH_MODE takes precedence
    return folder


class _LeanNode(Node):
    """A node without a dashboard, whose ports are all given.

    A raylet ends itself after waiting 15 s for a port that an agent chooses, and the imports of agents take
    longer on a busy machine or from a network file system.
    """

    def start_api_server(self, **options: Any) -> None:
        """Start no dashboard: without its pages a process of it would still run."""

    def start_raylet(self, *args: Any, **options: Any) -> None:
        # Ray's Python gives the raylet all ports but one, which is read from the file that the agent writes
        file = Path(self.get_session_dir_path(), f"{_LISTEN_PORT}_{self.node_id}")
        file.write_text(str(self.dashboard_agent_listen_port))
        super().start_raylet(*args, **options)


class _Keeper:
    """The keeper's side: start Ray, report its address or the loss of a part, end it with the driver.

    Args:
        cpus: the number of CPUs of the cluster.
        folder: to delete if the driver is killed.
        console: descriptor of the driver's standard error.
    """

    def __init__(self, cpus: int, folder: Path, console: int) -> None:
        self._cpus, self._folder, self._console, self._driver = cpus, folder, console, os.getppid()
        # ``_watch`` sees the processes that its constructor has started
        self._node = _LeanNode.__new__(_LeanNode)

    def run(self) -> None:
        become_subreaper()  # of Ray's daemons, whose parents end
        threading.Thread(target=self._watch, daemon=True).start()
        # As ``ray.init`` does, but without a connection: native code may end a connected process with Ray.
        parameters = RayParams(num_cpus=self._cpus, include_dashboard=False, no_monitor=True)
        parameters.update(**dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True)))
        try:
            self._node.__init__(parameters, head=True, shutdown_at_exit=False, ray_init_cluster=True)
            address = self._node.gcs_address
        except Exception:  # noqa: BLE001 - the driver shows the end of the log
            traceback.print_exc()
            address = ""
        print(address, flush=True)  # noqa: T201 - read by the driver
        threading.Event().wait()  # ``_watch`` ends this process

    def _watch(self) -> None:
        """Report a part that dies before the driver is connected; end everything when the driver ends."""
        lost = None
        while lost is None and not select.select([0], [], [], _INTERVAL_S)[0]:
            if lost := self._lost_part():
                print(f"{_LOST}{lost}", flush=True)  # noqa: T201
        lost = lost or self._lost_part()
        if os.read(0, len(_CONNECTED)) == _CONNECTED:
            lost = None  # the driver itself detects later deaths
            os.read(0, 1)  # until the driver ends
        kill_descendants(os.getpid())
        if os.getppid() != self._driver:  # it was killed
            shutil.rmtree(self._folder, ignore_errors=True)
            if lost:
                cause = f"its process {lost} died, which ended the run too; start the run again"
                with contextlib.suppress(OSError):
                    # Ray's native code has ended the driver, which can report nothing any more
                    os.write(self._console, f"WorkerError: {_not_started(cause)}\n".encode())
        os._exit(0)  # Ray's own exit would wait for the processes that were killed

    def _lost_part(self) -> str | None:
        """Return name and process id of a part that was started and has ended."""
        started = getattr(self._node, "all_processes", {})
        for name in _PARTS:
            for part in started.get(name, ()):
                if part.process.poll() is not None:
                    return f"{name} (pid {part.process.pid})"
        return None


def _free_ports(number: int) -> list[int]:
    """Return ports of which the system gives none to another process before an agent listens on it."""
    automatic = 0
    with contextlib.suppress(OSError):  # a sandbox may have no such file
        automatic = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    last = automatic if automatic > 2 * _FIRST_PORT else _LAST_PORT  # a container may give away all
    found: set[int] = set()
    while len(found) < number:
        port = random.randrange(_FIRST_PORT, last)
        with socket.socket() as bound, contextlib.suppress(OSError):
            bound.bind(("127.0.0.1", port))
            found.add(port)
    return [*found]


if __name__ == "__main__":
    _Keeper(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])).run()
