"""Processes that run episodes, as a rollout uses them.

An episode stays in one process, which has up to ``concurrency`` requests at a time. A process without the
episode of a request gets its row, seed and earlier turns first, as a message of its own. A process that is
lost (a method past its deadline, a crash, a line that is no answer) costs the request at fault; the others
are sent again to the next process, which plays their episodes again. A crash is the fault of the request that
crashes two processes, the second one alone in it: the first may have been killed from outside.
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

from strop.config.schema.environment import EnvironmentConfig
from strop.environments.loading import Environments
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
    """Earlier turns; a process that has not played them plays them again."""
    content: Mapping[str, Any]
    """``turn``, ``end``, or empty: the beginning alone."""
    answer: Future[dict[str, Any]] = field(default_factory=Future)
    deadline: float = 0.0
    begun: dict[str, Any] | None = None
    """The answer of the process that has begun the episode for this request; None while it has not."""
    is_suspect: bool = False
    """It was in flight when a process crashed."""

    @property
    def closes(self) -> bool:
        """True for the end of a lost episode, which only has to be closed."""
        return "end" in self.content and self.content["end"]["values"] is None


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

    @classmethod
    def of(cls, environments: Environments, settings: EnvironmentConfig) -> EnvironmentPool:
        """Return the pool for the section ``environment``."""
        return cls(
            environments.blueprint,
            environments.search_path,
            processes=settings.processes,
            concurrency=settings.concurrency,
            timeout_s=settings.timeout,
            memory_limit_mb=settings.memory_limit_mb,
        )

    def submit(self, request: Request) -> Future[dict[str, Any]]:
        """Send a request; its answer is that of ``child``, with that of the beginning if there was one.

        ``lost`` in its place is the reason why a turn cost its process, ``failed`` why anything else did.
        """
        if request.episode not in self._place:
            self._place[request.episode] = self._n_begun % len(self._processes)
            self._n_begun += 1
        place = self._place[request.episode]
        if "end" in request.content:
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
                self._start(self._suspects)
            return
        while self._waiting and len(self._in_flight) < self._concurrency:
            self._start(self._waiting)

    def _start(self, requests: deque[Request]) -> None:
        """Send the first of ``requests``; it stays there if no process starts."""
        request = requests[0]
        if request.closes and request.episode not in self._known:
            request.answer.set_result({})
        else:
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
            request.begun = None
            self._post(request)
        requests.popleft()

    def _post(self, request: Request) -> None:
        """Post what the process needs next for a request: its episode, or what is asked."""
        assert self._child is not None
        known, content = self._known.get(request.episode), request.content
        if self._is_begun(request):
            turns = [content["turn"]] if "turn" in content else []
            n_methods = 0 if turns else 2  # reward and close
        else:
            first = known or 0
            turns, n_methods = request.past[first:], 1
            content = {"row": dict(request.row), "seed": request.seed, "first": first, "past": turns}
        token = secrets.token_hex(8)
        self._child.lane.post(pickle.dumps({"token": token, "episode": request.episode, **content}))
        self._child.output.allow_more()
        # a thread of its own answers each, so its time starts now
        n_methods += sum(max(len(turn["calls"]), 1) for turn in turns)
        request.deadline = time.monotonic() + self._timeout_s * n_methods
        self._in_flight[token] = request

    def _is_begun(self, request: Request) -> bool:
        """Return True if the process has played the turns that a request needs."""
        known = self._known.get(request.episode)
        return known == len(request.past) or (known is not None and request.closes)

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
            self._take_answer(request, answer)

    def _take_answer(self, request: Request, answer: dict[str, Any]) -> None:
        if "failed" in answer or ("end" in request.content and self._is_begun(request)):
            self._known.pop(request.episode, None)  # as the child has done
        elif not self._is_begun(request):
            self._known[request.episode] = len(request.past)
            request.begun = answer
            if request.content:
                self._post(request)
                return
        else:
            self._known[request.episode] += 1
        request.answer.set_result({**(request.begun or {}), **answer})

    def _lose(self, reason: str, culprit: Request | None = None) -> None:
        """Drop the process: the request at fault is answered, the others are sent again."""
        requests = [*self._in_flight.values()]
        self._in_flight.clear()
        is_alone = culprit is None and len(requests) == 1 and requests[0].is_suspect
        culprit = requests[0] if is_alone else culprit
        is_begun = culprit is not None and self._is_begun(culprit)
        ending = self._drop()
        if culprit is None:
            for request in requests:
                request.is_suspect = True
            self._suspects.extend(requests)
            return
        if is_alone:
            reason = f"{reason}: {ending}"
        self._waiting.extendleft(reversed([request for request in requests if request is not culprit]))
        if "turn" in culprit.content and is_begun:
            culprit.answer.set_result({**(culprit.begun or {}), "lost": reason})
        else:
            again = ", or a turn that was played again" if culprit.past else ""
            method = "reward, or close" if is_begun else f"reset{again}"
            culprit.answer.set_result({"failed": f"{method}: {reason}"})

    def _drop(self) -> str:
        child, self._child = self._child, None
        self._known.clear()
        return "" if child is None else child.kill()
