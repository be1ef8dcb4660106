"""A queue of samples for a scoring process: filled in one thread as they come, emptied in another."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from strop.rewards.worker.records import Sample

Maker = Callable[[], Sample]
"""Makes a sample when it is taken: decoding is done in the taker's thread."""


class Cancelled(Exception):
    """The feed was cancelled."""


class Samples(Protocol):
    """Source of a scoring process's samples: a :class:`Feed`, or a share of one."""

    def take(self, *, wait: bool) -> Sample | None:
        """Return the next sample; None if there is none yet, or, with ``wait``, if there will be none."""
        ...

    def require_wanted(self) -> None:
        """Raise ``Cancelled`` if the outcomes will not be read."""
        ...


class Feed:
    """A first-in, first-out queue of samples with an end."""

    def __init__(self) -> None:
        self._items: deque[Maker] = deque()
        self._changed = threading.Condition()
        self._ended = self._cancelled = False

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> Feed:
        """Make a complete feed."""
        feed = cls()
        for sample in samples:
            feed.add(lambda sample=sample: sample)
        feed.end()
        return feed

    def add(self, make: Maker) -> None:
        """Append a sample."""
        with self._changed:
            self._items.append(make)
            self._changed.notify()

    def end(self) -> None:
        """Mark the feed as complete."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def cancel(self) -> None:
        """Make ``take`` and ``require_wanted`` raise ``Cancelled``."""
        with self._changed:
            self._cancelled = True
            self._changed.notify()

    def require_wanted(self) -> None:
        """Raise ``Cancelled`` after ``cancel``."""
        if self._cancelled:
            raise Cancelled

    def take(self, *, wait: bool) -> Sample | None:
        """Return the next sample; None if there is none yet, or, with ``wait``, if there will be none.

        Raises ``Cancelled`` after ``cancel``, and whatever making the sample raises.
        """
        with self._changed:
            while wait and not (self._items or self._ended or self._cancelled):
                self._changed.wait()
            self.require_wanted()
            make = self._items.popleft() if self._items else None
        return None if make is None else make()
