"""``machine.jsonl``: the machine and the versions of each start of a run, one JSON object per line.

The machine is the driver's; workers of a run on several nodes may have others.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

from strop.config.backends import ENGINES, ROLLOUTS
from strop.config.gpus import described_gpus
from strop.config.machine import installed_memory, usable_cores
from strop.redaction import redacted

MACHINE_FILE = "machine.jsonl"
_PACKAGES = ("strop", "torch", "transformers", "ray", "pyarrow", "numpy")


def record_start(folder: Path, *, step: int, steps: int, **more: str) -> None:
    """Append the machine that starts or resumes the run after ``step`` of ``steps`` iterations.

    ``more``: further facts of the run.
    """
    with open(folder / MACHINE_FILE, "a") as file:
        file.write(json.dumps({"step": step, "steps": steps, **more, **describe_machine()}) + "\n")


def describe_machine() -> dict[str, Any]:
    """Return host, system, processor, memory, GPUs, versions and command line, as plain values."""
    return {
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "host": platform.node(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": usable_cores(),
        "memory_gib": round(installed_memory() / (1 << 30), 1),
        "gpus": described_gpus("name,memory.total,driver_version"),
        "python": platform.python_version(),
        "packages": _versions(),
        "command": redacted(sys.argv),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
            return next(names, platform.machine())
    except OSError:
        return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    versions, kinds = {}, (*ENGINES.values(), *ROLLOUTS.values())
    for name in (*_PACKAGES, *(kind.distribution for kind in kinds if kind.distribution)):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
