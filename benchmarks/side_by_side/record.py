"""Record of a run: seconds of each iteration by phase, response lengths and peak memory."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

PHASES = ("generation", "log-probs", "update")
"""Recorded phases; ``rest`` is the remainder of an iteration."""


class Record:
    """Seconds by phase of each iteration; ``end_iteration`` closes one."""

    def __init__(self) -> None:
        self.iterations: list[dict[str, Any]] = []
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._lengths: list[int] = []
        self._began = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Add the seconds of the ``with`` block to phase ``name``."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - begun

    def add(self, name: str, seconds: float) -> None:
        """Add seconds measured elsewhere to phase ``name``."""
        self._seconds[name] += seconds

    def responses(self, lengths: list[int]) -> None:
        """Set the token counts of this iteration's responses."""
        self._lengths = lengths

    def end_iteration(self, total: float | None = None) -> None:
        """End an iteration of ``total`` seconds, by default the time since the previous one ended."""
        now = time.perf_counter()
        total = now - self._began if total is None else total
        rest = total - sum(self._seconds.values())
        self.iterations.append(
            {**self._seconds, "rest": rest, "iteration": total, "lengths": sorted(self._lengths)}
        )
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._began = now

    def write(self, path: str | Path, memory_mb: float | None = None) -> None:
        """Write JSON with the peak resident MB, by default those of ``peak_mb``."""
        memory_mb = peak_mb() if memory_mb is None else memory_mb
        Path(path).write_text(json.dumps({"iterations": self.iterations, "peak_mb": memory_mb}))


def peak_mb() -> float:
    """Return the sum of the peaks of resident MB of this process and of those below it that run now.

    Pages that a fork shares count for each. Not by ``getrusage``: that counts for a started program also the
    size of the process that started it.
    """
    return sum(_peaks_kb(os.getpid())) / 1024


def _peaks_kb(process: int) -> Iterator[int]:
    folder = Path(f"/proc/{process}")
    with contextlib.suppress(OSError):  # it may end meanwhile
        peak = (folder / "status").read_text().partition("VmHWM:")[2]
        yield int(peak.split()[0]) if peak else 0  # one that ended and was not waited for has none
        for thread in (folder / "task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from _peaks_kb(int(child))
