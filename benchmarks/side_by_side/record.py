"""What a run reports: seconds of each iteration by phase, its responses' lengths, and the peak of memory."""

from __future__ import annotations

import contextlib
import json
import resource
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

PHASES = ("generation", "log-probs", "update")
"""``rest`` is what of an iteration is in none of them."""


class Record:
    """Seconds by phase; ``end_iteration`` closes a row."""

    def __init__(self) -> None:
        self.iterations: list[dict[str, Any]] = []
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._lengths: list[int] = []
        self._began = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Count the time inside towards ``name``."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - begun

    def add(self, name: str, seconds: float) -> None:
        """Count seconds that were measured otherwise."""
        self._seconds[name] += seconds

    def responses(self, lengths: list[int]) -> None:
        """The tokens of each response of this iteration."""
        self._lengths = lengths

    def end_iteration(self, total: float | None = None) -> None:
        """``total``: seconds of the iteration, by default those since the last one ended."""
        now = time.perf_counter()
        total = now - self._began if total is None else total
        rest = total - sum(self._seconds.values())
        self.iterations.append(
            {**self._seconds, "rest": rest, "iteration": total, "lengths": sorted(self._lengths)}
        )
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._began = now

    def write(self, path: str | Path) -> None:
        """As JSON, with the peak of resident memory of this process and its largest ended child in MB."""
        peak = sum(
            resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
        Path(path).write_text(json.dumps({"iterations": self.iterations, "peak_mb": peak / 1024}))
