"""Functions of the driver that workers on Ray call while they work, each time about one row of their batch.

A worker's process keeps what is said until the driver fetches it: a thread there asks again and again, and
each question is answered as soon as there is something to tell.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import ray
from ray.exceptions import RayError


@dataclass(frozen=True)
class Reporter:
    """Stands for a function of the driver on its way to the workers."""

    key: str = field(default_factory=lambda: uuid.uuid4().hex)


class Reports:
    """What the workers of one process have to tell, by the key of the function that they call."""

    def __init__(self) -> None:
        self._queues: dict[str, SimpleQueue[tuple[Any, ...] | None]] = {}
        self._finding = threading.Lock()

    def connect(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments with a function for each ``Reporter``."""
        return {
            name: self._function(value.key) if isinstance(value, Reporter) else value
            for name, value in arguments.items()
        }

    def end(self, arguments: Mapping[str, Any]) -> None:
        """The call with these keyword arguments is over."""
        for value in arguments.values():
            if isinstance(value, Reporter):
                self._queue(value.key).put(None)

    def fetch(self, key: str) -> tuple[list[tuple[Any, ...]], bool]:
        """The arguments of calls of that function since the last fetch, and whether there may be more.

        Waits until there is something to say.
        """
        queue, news = self._queue(key), []
        while (arguments := queue.get()) is not None:
            news.append(arguments)
            if queue.empty():
                return news, True
        del self._queues[key]
        return news, False

    def _function(self, key: str) -> Callable[..., None]:
        queue = self._queue(key)
        return lambda *arguments: queue.put(arguments)

    def _queue(self, key: str) -> SimpleQueue[tuple[Any, ...] | None]:
        with self._finding:
            return self._queues.setdefault(key, SimpleQueue())


class Listener:
    """Has ``function`` called, in a thread, with what the hosts report until their calls are over.

    The first argument, a row of the rank's part, becomes the row of the whole batch (``rows`` by rank); news
    of padding is dropped.
    """

    def __init__(
        self,
        function: Callable[..., None],
        key: str,
        hosts: Mapping[int, Any],
        rows: Mapping[int, Sequence[int]],
    ) -> None:
        self._function, self._key, self._hosts, self._rows = function, key, hosts, rows
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="strop-reports", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until all is told, soon after the calls are over; raises what the function raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        asked = {host.news.remote(self._key): rank for rank, host in self._hosts.items()}
        while asked and ray.is_initialized():
            (reference, *_), _ = ray.wait(list(asked))
            rank = asked.pop(reference)
            try:
                news, may_be_more = ray.get(reference)
            except RayError:  # the process is gone: who waits for its result is told so
                continue
            self._tell(rank, news)
            if may_be_more and ray.is_initialized():
                asked[self._hosts[rank].news.remote(self._key)] = rank

    def _tell(self, rank: int, news: Sequence[tuple[Any, ...]]) -> None:
        rows = self._rows[rank]
        for row, *more in news:
            if row < len(rows) and self._error is None:
                try:
                    self._function(rows[row], *more)
                except Exception as error:  # noqa: BLE001 - the user's; raised again in finish()
                    self._error = error
