"""Samples on their way to a scoring process: put in from one thread as they come, taken out in another."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from strop.rewards.worker.records import Sample

Maker = Callable[[], Sample]
"""Makes a sample when its turn comes: decoding is the taker's work, not the giver's."""


class Cancelled(Exception):
    """Nobody waits for the outcomes any more."""


class Samples(Protocol):
    """What a scoring process takes its samples from: a :class:`Feed`, or a share of one."""

    def take(self, *, wait: bool) -> Sample | None:
        """The next sample; None when there is none now, or, with ``wait``, when there will be none."""
        ...

    def require_wanted(self) -> None:
        """Raise ``Cancelled`` when nobody waits for the outcomes any more."""
        ...


class Feed:
    """A queue of samples whose end is known; they come out in the order in which they were put in."""

    def __init__(self) -> None:
        self._items: deque[Maker] = deque()
        self._changed = threading.Condition()
        self._ended = self._cancelled = False

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> Feed:
        """All samples at once."""
        feed = cls()
        for sample in samples:
            feed.add(lambda sample=sample: sample)
        feed.end()
        return feed

    def add(self, make: Maker) -> None:
        """One more sample."""
        with self._changed:
            self._items.append(make)
            self._changed.notify()

    def end(self) -> None:
        """That was the last one."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def cancel(self) -> None:
        """Let the taker give up."""
        with self._changed:
            self._cancelled = True
            self._changed.notify()

    def require_wanted(self) -> None:
        """``Cancelled`` after ``cancel``."""
        if self._cancelled:
            raise Cancelled

    def take(self, *, wait: bool) -> Sample | None:
        """The next sample. None: there is none now; with ``wait``, there will be none.

        Raises ``Cancelled`` after ``cancel``, and what making the sample raises.
        """
        with self._changed:
            while wait and not (self._items or self._ended or self._cancelled):
                self._changed.wait()
            self.require_wanted()
            make = self._items.popleft() if self._items else None
        return None if make is None else make()
