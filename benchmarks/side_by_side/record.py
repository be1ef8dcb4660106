"""Record of a run: seconds of each iteration by phase, response lengths and peak memory."""

from __future__ import annotations

import contextlib
import json
import resource
import time
from collections.abc import Generator
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

    def write(self, path: str | Path) -> None:
        """Write JSON with the peak resident MB of this process plus its largest finished child."""
        peak = sum(
            resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
        Path(path).write_text(json.dumps({"iterations": self.iterations, "peak_mb": peak / 1024}))
