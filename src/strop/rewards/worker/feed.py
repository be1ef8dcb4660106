"""A queue of samples for a scoring process: filled in one thread as they come, emptied in another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable

from strop.rewards.worker.records import Sample

Maker = Callable[[], Sample]
"""Makes a sample when it is taken: decoding is done in the taker's thread."""


class Cancelled(Exception):
    """The feed was cancelled."""


class Feed:
    """A first-in, first-out queue of samples with an end."""

    def __init__(self, cancelled: threading.Event | None = None) -> None:
        """Make an empty feed; setting ``cancelled`` cancels it, too, but wakes no waiting ``take``."""
        self._makers: queue.SimpleQueue[Maker | None] = queue.SimpleQueue()  # None: the end
        self.cancelled = cancelled or threading.Event()

    @classmethod
    def of(cls, samples: Iterable[Sample], cancelled: threading.Event | None = None) -> Feed:
        """Make a complete feed."""
        feed = cls(cancelled)
        for sample in samples:
            feed.add(lambda sample=sample: sample)
        feed.end()
        return feed

    def add(self, make: Maker) -> None:
        """Append a sample."""
        self._makers.put(make)

    def end(self) -> None:
        """Mark the feed as complete."""
        self._makers.put(None)

    def cancel(self) -> None:
        """Make ``take`` and ``require_wanted`` raise ``Cancelled``."""
        self.cancelled.set()
        self.end()  # wakes a waiting taker

    def require_wanted(self) -> None:
        """Raise ``Cancelled`` after ``cancel``."""
        if self.cancelled.is_set():
            raise Cancelled

    def take(self, *, wait: bool) -> Sample | None:
        """Return the next sample; None if there is none yet, or, with ``wait``, if there will be none.

        Raises ``Cancelled`` after ``cancel``, and whatever making the sample raises.
        """
        try:
            make = self._makers.get(block=wait)
        except queue.Empty:
            make = None
        else:
            if make is None:
                self.end()  # for the next take
        self.require_wanted()
        return None if make is None else make()
