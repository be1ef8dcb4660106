"""Runs of `python -m strop.trainer.main_ppo` on Ray in processes of their own: to disturb and to watch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).parent
MARK = "STROP_TEST_RUN"


class RayRun:
    """One run: its console with the time of each line, and every process that descends from it."""

    def __init__(self, options: Sequence[str], *, sabotage: dict[str, Any] | None = None) -> None:
        self.mark = uuid.uuid4().hex
        environment = {
            **os.environ,
            MARK: self.mark,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
            "SABOTAGE": json.dumps(sabotage),
        }
        environment.pop("RAY_AUTH_MODE", None)  # strop's default
        environment["RAY_ADDRESS"] = "local"  # and not a cluster that another test has here
        self.marker = Path(sabotage["marker"]) if sabotage else None
        self.lines: list[tuple[float, str]] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "strop.trainer.main_ppo", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.time(), line.rstrip()))

    @property
    def console(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def wait(self, seconds: float = 900) -> int:
        """The exit status."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill_everything()
            raise AssertionError(f"still running after {seconds} s:\n{self.console[-3000:]}") from None
        finally:
            self._reader.join(5)

    def wait_until_struck(self, seconds: float = 900) -> float:
        """Wait for the sabotage and return its time."""
        assert self.marker is not None
        deadline = time.time() + seconds
        while time.time() < deadline:
            if self.marker.exists() and (text := self.marker.read_text()):
                return float(text.split()[1])
            assert self.process.poll() is None, self.console[-3000:]
            time.sleep(0.05)
        self.kill_everything()
        raise AssertionError(f"nothing was sabotaged:\n{self.console[-3000:]}")

    def wait_for(self, text: str, seconds: float = 300) -> None:
        """Wait for a line with ``text``."""
        deadline = time.time() + seconds
        while text not in self.console:
            assert self.process.poll() is None, self.console[-3000:]
            assert time.time() < deadline, self.console[-3000:]
            time.sleep(0.05)

    def listens_on(self) -> set[str]:
        """The addresses at which the run's processes accept connections."""
        found = set()
        for pid in self.processes():
            with contextlib.suppress(psutil.Error):
                sockets = psutil.Process(pid).net_connections(kind="inet")
                found |= {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}
        return {address.removeprefix("::ffff:") for address in found}

    def shared_memory(self) -> set[int]:
        """The inodes of the files in /dev/shm that the run's processes have mapped, removed ones included.

        Not the names: a semaphore is mapped before it gets its own.
        """
        found = set()
        for pid in self.processes():
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{pid}/maps").read_text()
                found.update(map(int, re.findall(r" (\d+) +/dev/shm/", maps)))
        return found

    def token(self) -> Path:
        """The file with the token of the run's cluster."""
        environments = [Path(f"/proc/{pid}/environ").read_bytes() for pid in self.processes()]
        names = {name for text in environments for name in re.findall(rb"RAY_AUTH_TOKEN_PATH=([^\0]+)", text)}
        assert len(names) == 1
        return Path(names.pop().decode())

    def processes(self) -> dict[int, str]:
        """Process ids and command lines of everything that the run started and that is alive."""
        found = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                if f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        return found

    def wait_until_gone(self, at_most: float = 120) -> None:
        """Wait until no process of the run is alive; helpers of Ray look for its head for up to a minute."""
        started = time.time()
        while left := self.processes():
            if time.time() - started > at_most:
                self.kill_everything()
                raise AssertionError(f"alive after {at_most} s: {left}")
            time.sleep(0.1)

    def kill(self, which: Callable[[str], bool]) -> list[str]:
        """kill -9 for the processes whose command line ``which`` picks."""
        killed = []
        for pid, command in self.processes().items():
            if which(command):
                os.kill(pid, signal.SIGKILL)
                killed.append(command)
        return killed

    def kill_everything(self) -> None:
        """End what is left."""
        self.kill(lambda command: True)


def trained_weights(run: Path, step: int) -> dict[str, str]:
    """A hash of the exported weights of actor and critic in a checkpoint."""
    return {
        role: hashlib.sha256(
            (run / f"global_step_{step}" / role / "huggingface" / "model.safetensors").read_bytes()
        ).hexdigest()
        for role in ("actor", "critic")
    }
