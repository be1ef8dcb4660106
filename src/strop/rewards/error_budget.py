"""How many samples may fail before a run must stop."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

WINDOW = 256


class ErrorBudget:
    """Counts failed samples over the present batch and the ones before it, 256 samples in all.

    A batch larger than that is judged alone. The window keeps small batches fair: one failed sample of four
    is a quarter, and yet no reason to stop. So one failure is always borne, unless ``max_rate`` is 0.
    """

    def __init__(self, max_rate: float) -> None:
        self.max_rate = max_rate
        self._before: deque[bool] = deque(maxlen=WINDOW)
        self._allowed = math.inf
        self._failed = 0

    def begin(self, samples: int) -> None:
        """A batch of so many samples comes next."""
        kept = list(self._before)[-(WINDOW - samples) :] if samples < WINDOW else []
        self._failed = sum(kept)
        allowed = self.max_rate * (len(kept) + samples)
        self._allowed = max(allowed, 1.0) if self.max_rate > 0 else 0.0

    def count(self, failed: bool) -> bool:
        """Count one sample; whether there are now too many failures, however the rest of the batch ends."""
        self._failed += failed
        return self._failed > self._allowed

    def end(self, failed: Iterable[bool]) -> None:
        """The batch is done; its samples by row, in whichever order they were counted."""
        self._before.extend(failed)
