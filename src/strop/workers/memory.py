"""Memory of a worker's process: its peak in each phase, and the allocators of a GPU and of the C library."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from strop.config.backends import ROLLOUTS
from strop.config.placement import Placement, runs_on_ray
from strop.config.schema import Config, RootConfig
from strop.torch_private import set_allocator

Method = TypeVar("Method", bound=Callable[..., Any])
_PROCESS = Path("/proc/self")
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_MALLOC = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_KEPT, _OWN_MAPPING = 1 << 29, 1 << 27
"""Bytes of free memory from which glibc gives the heap's end back, and of the smallest buffer outside it."""


class PeakMemory:
    """Largest memory of this process by phase, in GiB.

    On a GPU what torch has allocated, with the tensors of a rollout that sleeps. On a CPU the resident size
    of the process, with everything else that lives in it: the driver of a run in one process, roles in
    other threads, and freed memory (``keep_freed_memory``). Systems other than Linux give no figures.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # pools of a run in one process have a thread each
        self._running = 0
        self._peaks: dict[str, float] = {}

    def begin(self, device: torch.device) -> None:
        """Count from the present size, unless another thread is in a phase: then from its beginning."""
        with self._lock:
            if self._running == 0:
                _reset_peak(device)
            self._running += 1

    def end(self, phase: str, device: torch.device) -> None:
        """Keep the peak since ``begin`` if it is the largest of the phase."""
        with self._lock:
            self._running -= 1
            if (peak := _peak(device)) is not None:
                self._peaks[phase] = max(peak, self._peaks.get(phase, 0.0))

    def take(self, phases: set[str]) -> dict[str, float]:
        """Return the peaks of ``phases`` since the last call."""
        with self._lock:
            return {phase: self._peaks.pop(phase) for phase in sorted(phases & self._peaks.keys())}


PEAKS = PeakMemory()
"""Peaks of this process, whose workers share its memory."""


def phase(name: str) -> Callable[[Method], Method]:
    """Record the peak of memory in a method of a worker as that of the phase ``name``."""

    def measured(method: Any) -> Any:
        @functools.wraps(method)
        def run(worker: Any, *args: Any, **kwargs: Any) -> Any:
            worker.phases.add(name)
            PEAKS.begin(worker.device)
            try:
                return method(worker, *args, **kwargs)
            finally:
                PEAKS.end(name, worker.device)

        return run

    return measured


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        (_PROCESS / "clear_refs").write_text("5")  # of VmHWM alone


def _peak(device: torch.device) -> float | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    try:
        status = (_PROCESS / "status").read_text()
    except OSError:
        return None
    sizes = (line.split() for line in status.splitlines())
    # the kernel counts in KiB
    return next((int(words[1]) / 2**20 for words in sizes if words[:1] == ["VmHWM:"]), None)


def prefer_expandable_segments(config: RootConfig, role: str, device: torch.device) -> None:
    """Let torch grow its blocks on a GPU, so that sizes which differ in every micro-batch do not fragment it.

    An allocator that the user configured stays as it is; so does that of a process with a rollout that works
    with none such (``RolloutKind.forbids_growing_segments``).
    """
    if device.type != "cuda" or any(os.environ.get(name) for name in _ALLOCATOR):
        return
    if isinstance(config, Config):
        rollout, placed = ROLLOUTS[config.actor_rollout_ref.rollout.name], Placement.from_config(config)
        pool = placed.roles[placed.rollout_role]
        own_pool = placed.roles.get(role, pool)  # a role of the user's: unknown
        shares = own_pool == pool or not runs_on_ray(config)  # without Ray all pools are in one process
        if shares and rollout.forbids_growing_segments(config):
            return
    set_allocator("expandable_segments:True")


def keep_freed_memory(device: torch.device) -> None:
    """Let glibc keep freed memory on a CPU for the next micro-batch, instead of giving it back.

    The system takes longer to supply a new page than an operation to fill it: updates take 0.95 to 1 of the
    time, with small models and large vocabularies down to 0.7. What is kept depends on the order of buffers:
    peaks were 0.8 to 1.5 of those without it. In other threads than the main one, as in Ray's workers, glibc
    still gives buffers of 64 MiB and more back. Settings of the user's environment stay.
    """
    if device.type != "cpu" or any(os.environ.get(name) for name in _MALLOC):
        return
    with suppress(AttributeError, OSError):  # another C library
        set_option = ctypes.CDLL(None).mallopt
        # Before glibc 2.35 this size is refused; the other option alone would unmap every larger buffer.
        if set_option(_MMAP_THRESHOLD, _OWN_MAPPING):
            set_option(_TRIM_THRESHOLD, _KEPT)
