"""Process that kills what is left of a private Ray cluster when the driver is killed.

Ray's agents would otherwise search for the head for a minute, and hold their memory meanwhile. Run as
``python -m strop.controller.ray.orphans PID``; standard input is a pipe that closes when the driver ends.
"""

from __future__ import annotations

import contextlib
import select
import subprocess
import sys

import psutil

_INTERVAL_S = 2.0


def watch() -> subprocess.Popen[bytes]:
    """Start the process for this one, in a session that a terminal's Ctrl-C does not reach."""
    own = str(psutil.Process().pid)
    command = [sys.executable, "-P", "-m", __name__, own]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def _main() -> None:
    pid = int(sys.argv[1])
    found: set[psutil.Process] = set()
    while not select.select([sys.stdin], [], [], _INTERVAL_S)[0]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.ppid() == pid and process.name() in ("raylet", "gcs_server"):
                    found |= {process, *process.children(recursive=True)}
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.kill()


if __name__ == "__main__":
    _main()
