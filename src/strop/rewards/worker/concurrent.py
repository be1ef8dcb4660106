"""Scoring of several samples by one process at the same time: async functions, and functions for a batch."""

from __future__ import annotations

import itertools
import pickle
import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strop.rewards.worker import wire
from strop.rewards.worker.feed import Feed
from strop.rewards.worker.records import Outcome, Request, encode, read_answer, timed_out

if TYPE_CHECKING:
    from strop.rewards.worker.process import RewardProcess
    from strop.rewards.worker.running import Child

_GRACE_S = 1.0  # the process itself cuts off coroutines at their deadline; this is for one that does not wait
_TICK_S = 0.005  # time until a sample that is added while others are in flight is sent


@dataclass
class _Sent:
    number: int
    request: Request
    deadline: float | None = None
    """None while it waits in the process for one before it."""


def concurrently(process: RewardProcess, samples: Feed) -> Generator[Outcome]:
    """Yield each sample's outcome, in order; the process scores up to ``max_concurrency`` at the same time.

    As many again are sent ahead, so that the process begins the next one without waiting for this one. Each
    sample has ``timeout_s`` seconds from when it is begun. If the process ends, or blocks its event loop, it
    is not known which sample did it: those that were begun are scored again one at a time.
    """
    return _Concurrent(process, samples).outcomes()


class _Concurrent:
    def __init__(self, process: RewardProcess, samples: Feed) -> None:
        self._process, self._samples = process, samples
        self._in_flight: dict[str, _Sent] = {}  # by token, in the order in which they are begun
        self._one_by_one: deque[_Sent] = deque()
        self._again: deque[_Sent] = deque()  # were sent ahead to a process that is lost
        self._done: dict[int, Outcome] = {}
        self._taken = 0
        self._child: Child | None = None
        self._lane: wire.Lane | None = None

    def outcomes(self) -> Generator[Outcome]:
        """See ``concurrently``."""
        following = 0
        try:
            while self._fill():
                if self._in_flight:
                    self._receive()
                while following in self._done:
                    yield self._done.pop(following)
                    following += 1
        except BaseException:
            if self._in_flight:
                self._process.drop()
            raise
        if self._lane is not None and self._lane.has_rest:
            self._process.drop()

    def _fill(self) -> bool:
        """Send samples while there are some and the process has room; return False after the last one."""
        if self._one_by_one:
            if not self._in_flight:
                self._post(self._one_by_one.popleft())
            self._samples.require_wanted()
            return True
        while self._has_room():
            if self._again:
                self._post(self._again.popleft())
                continue
            sample = self._samples.take(wait=not self._in_flight and not self._done)
            if sample is None:
                break
            number, self._taken = self._taken, self._taken + 1
            request = encode(sample)
            if isinstance(request, Outcome):
                self._done[number] = request
            else:
                self._post(_Sent(number, request))
        return bool(self._in_flight or self._done)

    def _has_room(self) -> bool:
        return len(self._in_flight) < 2 * self._process.max_concurrency

    def _post(self, sent: _Sent) -> None:
        if not self._in_flight:
            child = self._process.start()
            if child is not self._child or self._lane is None:
                self._child, self._lane = child, wire.Lane(child.requests, child.answers)
        assert self._child is not None
        assert self._lane is not None
        self._lane.post(pickle.dumps(tuple(sent.request)))
        self._child.output.allow_more()
        self._in_flight[sent.request.token] = sent

    def _begun(self) -> list[_Sent]:
        """Return the samples that the process works at; set the deadlines of new ones."""
        begun = list(itertools.islice(self._in_flight.values(), self._process.max_concurrency))
        for sent in reversed(begun):
            if sent.deadline is not None:
                break
            sent.deadline = time.monotonic() + self._process.timeout_s + _GRACE_S
        return begun

    def _receive(self) -> None:
        """Wait for one answer, or for a moment if further samples may come."""
        child, lane = self._child, self._lane
        assert child is not None
        assert lane is not None

        def is_alive() -> bool:
            self._samples.require_wanted()
            return child.is_alive()

        deadline = self._begun()[0].deadline
        assert deadline is not None
        has_room = not self._one_by_one and self._has_room()
        try:
            answer = lane.exchange(
                min(deadline, time.monotonic() + _TICK_S) if has_room else deadline, is_alive
            )
            if answer is None:
                return
            token, outcome = read_answer(answer, self._in_flight.keys())
        except TimeoutError:
            if time.monotonic() >= deadline:
                self._process.drop()
                self._lost(timed_out(self._process.timeout_s))
        except EOFError:
            ending = self._process.drop()
            self._lost(Outcome("crashed", error=f"the reward function ended its process: {ending}"))
        except ValueError as error:
            self._process.drop()
            found = f"the reward function wrote into its process's pipe: {error}"
            self._lost(Outcome("crashed", error=found))
        else:
            n_begun = len(self._begun()) - 1
            self._done[self._in_flight.pop(token).number] = outcome
            if outcome.status == "crashed":
                self._process.drop()
                self._score_again(n_begun)

    def _lost(self, outcome: Outcome) -> None:
        """Give the only sample that a lost process worked at this outcome; score several again."""
        begun = self._begun()
        if len(begun) > 1:
            self._score_again(len(begun))
            return
        (sent,) = begun
        del self._in_flight[sent.request.token]
        self._done[sent.number] = outcome
        self._score_again(0)

    def _score_again(self, n_begun: int) -> None:
        """Score the first ones in flight again one at a time, and then send the others again."""
        sent = [_Sent(sent.number, sent.request) for sent in self._in_flight.values()]
        self._one_by_one.extend(sent[:n_begun])
        self._again.extend(sent[n_begun:])
        self._in_flight.clear()
        self._child = self._lane = None


def whole_batch(process: RewardProcess, samples: Feed) -> Generator[Outcome]:
    """Yield each sample's outcome, in order; one call, within ``timeout_s`` seconds, scores all of them."""
    requests = []
    while (sample := samples.take(wait=True)) is not None:
        requests.append(encode(sample))
    outcomes = {row: request for row, request in enumerate(requests) if isinstance(request, Outcome)}
    waiting = {
        request.token: (row, request) for row, request in enumerate(requests) if isinstance(request, Request)
    }
    if waiting:
        try:
            for row, outcome in _answers(process, samples, waiting):
                outcomes[row] = outcome
        except BaseException:
            process.drop()
            raise
    yield from (outcomes[row] for row in range(len(requests)))


def _answers(
    process: RewardProcess, samples: Feed, waiting: dict[str, tuple[int, Request]]
) -> Generator[tuple[int, Outcome]]:
    """Exchange messages about one batch; if the process is lost, that is the outcome of all without one."""
    child, size = process.start(), len(waiting)
    lane = wire.Lane(child.requests, child.answers)
    lane.post(pickle.dumps([tuple(request) for _, request in waiting.values()]))
    child.output.allow_more()
    deadline = time.monotonic() + process.timeout_s + (_GRACE_S if process.scorer.is_async else 0.0)

    def is_alive() -> bool:
        samples.require_wanted()
        return child.is_alive()

    end: Outcome | None = None
    while waiting and end is None:
        try:
            answer = lane.exchange(deadline, is_alive)
            if answer is None:
                continue
            token, outcome = read_answer(answer, waiting.keys())
        except TimeoutError:
            end = timed_out(process.timeout_s, batch=size)
        except EOFError:
            end = Outcome("crashed", error=f"the reward function ended its process: {process.drop()}")
        except ValueError as error:
            end = Outcome("crashed", error=f"the reward function wrote into its process's pipe: {error}")
        else:
            yield waiting.pop(token)[0], outcome
            end = outcome if outcome.status == "crashed" else None
    if end is not None or lane.has_rest:
        process.drop()
    for row, _ in waiting.values():
        assert end is not None
        yield row, end
