"""Wall-clock seconds by phase of one iteration."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager


class PhaseTimer:
    """Adds up seconds by name; ``take`` hands them out as ``timing_s/<name>`` and starts again."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Count the time inside towards ``name``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Everything counted since the last call."""
        taken = {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds = {}
        return taken
