"""Description of the machine for tables of results."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path

_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
"""CPU features that determine the speed of matrix products."""


def description(*packages: str, threads: int) -> str:
    """Describe the date, processor, memory, threads and package versions."""
    cpu = Path("/proc/cpuinfo").read_text()
    model = next(
        (line.split(":")[1].strip() for line in cpu.splitlines() if line.startswith("model name")), "?"
    )
    flags = next((line.split(":")[1].split() for line in cpu.splitlines() if line.startswith("flags")), [])
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    return (
        f"{datetime.date.today()}; {os.cpu_count()} cores ({model}; "
        f"{' '.join(flag for flag in _FLAGS if flag in flags)}), {memory:.0f} GiB, {threads} threads; "
        f"Python {platform.python_version()}, {versions}."
    )
