"""Cores and memory of this machine, and memory of its GPUs, without torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from strop.config.gpus import described_gpus
from strop.config.placement import Root, pools_of, uses_gpu

_GROUPS = Path("/sys/fs/cgroup")


class Memory(NamedTuple):
    """Memory that one process of a run may use."""

    size: int
    """Size in bytes."""
    place: str
    """The machine or a GPU, in words."""
    processes: int
    """Processes that share it."""


def memory_for(config: Root) -> Memory | None:
    """Return the memory for the processes of a run: this machine's, or that of its smallest GPU.

    None: the run uses GPUs of unknown size, as on a cluster's node without any.
    """
    if uses_gpu(config):
        size = gpu_memory()
        return Memory(size, "a GPU of this machine", 1) if size else None
    processes = sum(max(on_nodes) for on_nodes in pools_of(config).values())
    return Memory(machine_memory(), "this machine", processes)


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_memory() -> int:
    """Return the bytes of memory that this process may use: all, or the limit of its control group."""
    return min([installed_memory(), *_group_limits()])


def installed_memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _group_limits(membership: Path = Path("/proc/self/cgroup"), root: Path = _GROUPS) -> Iterator[int]:
    """Yield the limits of the control groups that this process is in, of version 1 or 2."""
    lines = membership.read_text().splitlines() if membership.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / controllers
        own = top / path.lstrip("/")
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        for folder in (own, *(parent for parent in own.parents if parent == top or top in parent.parents)):
            with contextlib.suppress(OSError, ValueError):  # no such group in this container; "max"
                yield int((folder / name).read_text())


@cache
def gpu_memory() -> int | None:
    """Return the bytes of the smallest GPU that this process may use; None if nvidia-smi does not tell."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    sizes = described_gpus("memory.total", ",nounits", *(["-i", chosen] if chosen else []))
    with contextlib.suppress(ValueError):  # none, or one that has no number
        return min(int(size) << 20 for size in sizes)
    return None
