"""GPUs of this machine, without torch, which takes seconds to count them, and CUDA, which takes memory."""

from __future__ import annotations

import functools
import itertools
import os
import re
import subprocess
from pathlib import Path


def visible_gpus() -> int:
    """Return the number of GPUs that this process may use; torch, which counts them too, takes seconds."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        # as CUDA, which reads up to the first that is none: of Slurm it is NoDevFiles in jobs without GPUs
        is_gpu = re.compile(r"\s*(\d+|(GPU|MIG)-.*)\s*").fullmatch
        return len([*itertools.takewhile(is_gpu, listed.split(","))])
    found = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return len(found) or _gpus_of_wsl()


@functools.cache
def _gpus_of_wsl() -> int:
    """Return the number of GPUs under WSL, where one device stands for all."""
    return len(described_gpus("name")) if Path("/dev/dxg").exists() else 0


def described_gpus(what: str, form: str = "", *options: str) -> list[str]:
    """Return a line of nvidia-smi for each GPU; none without it. CUDA itself would take memory."""
    command = ["nvidia-smi", f"--query-gpu={what}", f"--format=csv,noheader{form}", *options]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in told.splitlines() if line.strip()]
