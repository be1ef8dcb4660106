"""A run of a system as a process of its own, with one thread, and what it used."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import NamedTuple


class Used(NamedTuple):
    """CPU seconds of a process and its children, and peak resident memory of the largest of them."""

    cpu_seconds: float
    peak_mb: float


def run_alone(command: list[str], log: Path) -> Used:
    """Run ``command`` with its output in ``log``; raise ``SystemExit`` with the end of it on a failure."""
    with log.open("w") as output:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(log.read_text()[-4000:])
    return Used(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def measure(script: str, python: Path, system: str, folder: Path, steps: int) -> tuple[list[float], Used]:
    """Run a system of ``script``, which leaves its curve in ``folder``; return the curve and what it used."""
    command = [str(python), script, "--system", system, "--folder", str(folder), "--steps", str(steps)]
    used = run_alone(command, folder / f"{system}.log")
    return json.loads((folder / "curve.json").read_text()), used
