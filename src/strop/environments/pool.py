"""Processes that run episodes, as a rollout uses them.

An episode stays in one process, which has up to ``concurrency`` requests at a time. A process that is lost
(a method past its deadline, a crash, a line that is no answer) costs the request at fault; the others are
sent again to the next process, which plays their episodes again.
"""

from __future__ import annotations

import json
import pickle
import queue
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from strop.rewards.worker.process import Child

_LONGEST_LINE = 1 << 26  # bytes of an answer: the texts of all turns that were played again
_TICK_S = 0.002  # time until a request that comes while others are in flight is sent


@dataclass
class Request:
    """A turn of an episode, or its end."""

    episode: str
    row: Mapping[str, Any]
    seed: int
    past: Sequence[Mapping[str, Any]]
    """Earlier turns; those that a process has not played are played again."""
    content: Mapping[str, Any]
    """``begin``, ``turn``, or ``turns`` and ``values`` for the end."""
    answer: Future[dict[str, Any]] = field(default_factory=Future)
    deadline: float = 0.0


class EnvironmentPool:
    """Run episodes in ``processes`` killable processes."""

    def __init__(
        self,
        blueprint: bytes,
        search_path: Sequence[str],
        *,
        processes: int = 1,
        concurrency: int = 64,
        timeout_s: float = 30.0,
        memory_limit_mb: int | None = None,
    ) -> None:
        """``blueprint`` is pickled; ``search_path`` is ``sys.path`` of the processes."""
        setup = pickle.dumps((list(search_path), blueprint))
        self._processes = [_Process(setup, concurrency, timeout_s, memory_limit_mb) for _ in range(processes)]
        for process in self._processes:
            # a rollout that is dropped, as at the end of ``strop.train``, leaves no process behind
            weakref.finalize(self, process.submit, None).atexit = False
        self._place: dict[str, int] = {}
        self._n_begun = 0

    def submit(self, request: Request) -> Future[dict[str, Any]]:
        """Send a request; its answer is the child's, or has ``lost``: the reason why its process was lost."""
        if request.episode not in self._place:
            self._place[request.episode] = self._n_begun % len(self._processes)
            self._n_begun += 1
        place = self._place[request.episode]
        if "turns" in request.content:
            del self._place[request.episode]
        self._processes[place].submit(request)
        return request.answer

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.close()


class _Process:
    """A process with the thread that talks to it."""

    def __init__(self, setup: bytes, concurrency: int, timeout_s: float, memory_limit_mb: int | None) -> None:
        self._setup, self._concurrency, self._timeout_s = setup, concurrency, timeout_s
        self._memory_limit_mb = memory_limit_mb
        self._arrived: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._waiting: deque[Request] = deque()
        self._suspects: deque[Request] = deque()
        """Requests that were in flight when a process crashed; each runs alone."""
        self._in_flight: dict[str, Request] = {}
        self._child: Child | None = None
        self._known: dict[str, int] = {}
        """Episodes of the running process, and how many of their turns it has played."""
        self._open = True
        self._thread = threading.Thread(target=self._run, name="strop-environments", daemon=True)
        self._thread.start()

    def submit(self, request: Request | None) -> None:
        """Send a request; None ends the process, and the requests without an answer."""
        self._arrived.put(request)

    def close(self) -> None:
        self.submit(None)
        self._thread.join(10.0)

    def _run(self) -> None:
        while self._open:
            try:
                self._take(wait=not (self._in_flight or self._waiting or self._suspects))
                self._send()
                if self._in_flight:
                    self._receive()
            # Given to every request that waits, in its caller's thread.
            except BaseException as error:  # noqa: BLE001
                self._fail(error)
        self._fail(RuntimeError("the processes of the environment are closed"))

    def _fail(self, error: BaseException) -> None:
        self._drop()
        for request in (*self._suspects, *self._waiting, *self._in_flight.values()):
            request.answer.set_exception(error)
        for requests in (self._suspects, self._waiting, self._in_flight):
            requests.clear()

    def _take(self, *, wait: bool) -> None:
        while True:
            try:
                request = self._arrived.get(block=wait)
            except queue.Empty:
                return
            if request is None:
                self._open = False
                return
            self._waiting.append(request)
            wait = False

    def _send(self) -> None:
        if self._suspects:
            if not self._in_flight:
                self._post(self._suspects)
            return
        while self._waiting and len(self._in_flight) < self._concurrency:
            self._post(self._waiting)

    def _post(self, requests: deque[Request]) -> None:
        """Post the first of ``requests``; it stays there if no process starts."""
        if self._child is None or (not self._in_flight and self._child.is_gone()):
            self._drop()
            self._child = Child(
                self._setup,
                self._memory_limit_mb,
                start_timeout_s=120.0,
                module="strop.environments.child",
                what="environment",
                section="environment",
            )
        self._child.lane.longest_line = _LONGEST_LINE
        request = requests[0]
        known = self._known.get(request.episode)
        past = [dict(turn) for turn in request.past[known or 0 :]]
        begun = {} if known is not None else {"row": dict(request.row), "seed": request.seed}
        token = secrets.token_hex(8)
        message = {"token": token, "episode": request.episode, "past": past, **begun, **request.content}
        self._child.lane.post(pickle.dumps(message))
        self._child.output.allow_more()
        self._known[request.episode] = len(request.past) + ("turn" in request.content)
        # a thread of its own answers each, so its time starts now
        turns = [*past, request.content.get("turn", {})]
        n_methods = sum(max(len(turn.get("calls", ())), 1) for turn in turns) + bool(begun)
        request.deadline = time.monotonic() + self._timeout_s * n_methods
        self._in_flight[token] = requests.popleft()

    def _receive(self) -> None:
        child = self._child
        assert child is not None
        first = min(self._in_flight.values(), key=lambda request: request.deadline)
        may_send = not self._suspects and len(self._in_flight) < self._concurrency
        until = min(first.deadline, time.monotonic() + _TICK_S) if may_send else first.deadline
        try:
            if (line := child.lane.exchange(until, child.is_alive)) is None:
                return
            answer = json.loads(line)
            request = self._in_flight.pop(answer.pop("token"))
        except TimeoutError:
            if time.monotonic() >= first.deadline:
                self._lose(f"it took longer than {self._timeout_s:g} s and was cut off", first)
        except EOFError:
            self._lose("it ended its process")
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            self._lose("it wrote into its process's pipe")
        else:
            if "turns" in request.content or "failed" in answer:  # the child has dropped it, too
                self._known.pop(request.episode, None)
            request.answer.set_result(answer)

    def _lose(self, reason: str, culprit: Request | None = None) -> None:
        """Drop the process: the request at fault is answered, the others are sent again."""
        ending = self._drop()
        requests = [*self._in_flight.values()]
        self._in_flight.clear()
        if culprit is None and len(requests) == 1:
            culprit = requests[0]
            reason = f"{reason}: {ending}"
        if culprit is None:
            self._suspects.extend(requests)
            return
        self._waiting.extendleft(reversed([request for request in requests if request is not culprit]))
        culprit.answer.set_result({"past": [], "lost": reason})

    def _drop(self) -> str:
        child, self._child = self._child, None
        self._known.clear()
        return "" if child is None else child.kill()
