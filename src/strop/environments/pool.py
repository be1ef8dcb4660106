"""Processes that run episodes, as a rollout uses them.

An episode stays in one process, which has up to ``concurrency`` requests at a time. A process without the
episode of a request gets its row, seed and earlier turns first, as a message of its own. A process that is
lost (a method past its deadline, a crash, a line that is no answer) costs the request at fault; the others
are sent again to the next process, which plays their episodes again. At fault is a request that costs two
processes, the second one with its episode alone: the first may have been killed from outside, and a method
may be late because others of its process compute.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import queue
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from strop.config.schema.environment import EnvironmentConfig
from strop.environments.loading import Environments
from strop.errors import ConfigError
from strop.pictures import Sent
from strop.rewards.arguments import ground_truth_of
from strop.rewards.worker.process import Child

_start_child = partial(Child, module="strop.environments.child", what="environment", section="environment")
_LONGEST_LINE = 1 << 26  # bytes of an answer: the texts of all turns that were played again
_TICK_S = 0.002  # time until a request that comes while others are in flight is sent
_CLOSE_S = 0.2  # the same for the request to end
_LATE = 0.1  # part of the timeout: requests so close to their deadline may be late as well as the first


@dataclass(eq=False)
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
    """It was in flight when a process was lost."""

    @property
    def closes(self) -> bool:
        """True for the end of a lost episode, which only has to be closed."""
        return "end" in self.content and self.content["end"]["values"] is None


def row_of(columns: Mapping[str, Any], images: Iterable[int] | None = None) -> dict[str, Any]:
    """Return the columns of a row as methods get them: with the ground truth that reward functions get.

    ``images``: digests of its pictures, which they get as those.
    """
    truth = ground_truth_of(columns.get("reward_model"), columns.get("ground_truth"))
    own = {} if truth is None else {"ground_truth": truth}
    return {**columns, **own, **({} if images is None else {"images": Sent(images)})}


class EnvironmentPool:
    """Run episodes in killable processes."""

    def __init__(self, environments: Environments, settings: EnvironmentConfig) -> None:
        """Start nothing before the first request; ``settings`` is the section ``environment``."""
        setup = pickle.dumps((environments.search_path, environments.blueprint))
        self._processes = [_Process(setup, settings) for _ in range(settings.processes)]
        for process in self._processes:
            # a rollout that is dropped, as at the end of ``strop.train``, leaves no process behind
            weakref.finalize(self, process.submit, None).atexit = False
        self._place: dict[str, int] = {}
        self._n_begun = 0

    def try_reset(self, rows: Iterable[Mapping[str, Any]]) -> str:
        """Begin and close an episode of the first of ``rows`` that allows it; return the text of ``reset``.

        Raises ``ConfigError`` with the first failure if there is none.
        """
        failure, name = "", "tried"
        for row in rows:
            answer = self.submit(Request(name, row, 0, [], {})).result()
            if "failed" not in answer:
                end = {"end": {"turns": [], "values": None}}
                self.submit(Request(name, row, 0, [], end)).result()
                return answer["text"]
            failure = failure or answer.get("traceback", answer["failed"])
        raise ConfigError(f"reset of the environment fails for the first rows:\n{failure.strip()}")

    def submit(self, request: Request) -> Future[dict[str, Any]]:
        """Send a request; its answer is that of ``child``, with that of the beginning if there was one.

        ``lost`` in its place is the reason why a turn cost its process, ``failed`` why anything else did;
        ``is_late``: it was past its deadline.
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
        for process in self._processes:
            process.close()


class _Process:
    """A process with the thread that talks to it."""

    def __init__(self, setup: bytes, settings: EnvironmentConfig) -> None:
        self._setup, self._memory_limit_mb = setup, settings.memory_limit_mb
        self._concurrency, self._timeout_s = settings.concurrency, settings.timeout
        self._arrived: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._waiting: deque[Request] = deque()
        self._suspects: deque[Request] = deque()
        """Requests that may have cost a process; each runs alone."""
        self._in_flight: dict[str, Request] = {}
        self._child: Child | None = None
        self._known: dict[str, int] = {}
        """Episodes of the running process, and how many of their turns it has played."""
        self._open, self._has_ended = True, False
        self._thread = threading.Thread(target=self._run, name="strop-environments", daemon=True)
        self._thread.start()

    def submit(self, request: Request | None) -> None:
        """Send a request; None ends the process, and the requests without an answer."""
        self._arrived.put(request)
        if self._has_ended:
            self._refuse()

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
        self._has_ended = True
        self._refuse()

    def _refuse(self) -> None:
        """Answer all requests, and those that have arrived since, by an error."""
        with contextlib.suppress(queue.Empty):
            while True:
                if (request := self._arrived.get(block=False)) is not None:
                    self._waiting.append(request)
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
        if self._suspects and not self._in_flight:
            self._start(self._suspects)
        if self._tries_alone():
            return
        while self._waiting and len(self._in_flight) < self._concurrency:
            self._start(self._waiting)

    def _tries_alone(self) -> bool:
        return bool(self._suspects) or any(request.is_suspect for request in self._in_flight.values())

    def _start(self, requests: deque[Request]) -> None:
        """Send the first of ``requests``; it stays there if no process starts."""
        request = requests[0]
        if request.closes and request.episode not in self._known:
            request.answer.set_result({})
        else:
            if self._child is None or (not self._in_flight and self._child.is_gone()):
                self._drop()
                self._child = _start_child(self._setup, self._memory_limit_mb, longest_line=_LONGEST_LINE)
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
        may_send = not self._tries_alone() and len(self._in_flight) < self._concurrency
        until = min(first.deadline, time.monotonic() + (_TICK_S if may_send else _CLOSE_S))
        try:
            if (line := child.lane.exchange(until, child.is_alive)) is None:
                return
            answer = json.loads(line)
            request = self._in_flight.pop(answer.pop("token"))
        except TimeoutError:
            if time.monotonic() >= first.deadline:
                self._lose(f"it took longer than {self._timeout_s:g} s and was cut off", is_late=True)
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

    def _lose(self, reason: str, *, is_late: bool = False) -> None:
        """Drop the process: a request that is alone at fault is answered, the others are sent again."""
        requests, now = [*self._in_flight.values()], time.monotonic()
        suspects = [one for one in requests if not is_late or one.deadline < now + _LATE * self._timeout_s]
        culprit = suspects[0] if len(requests) == 1 and requests[0].is_suspect else None
        if culprit is not None and not is_late and not self._known.keys() <= {culprit.episode}:
            culprit = None  # the memory is of all episodes
        is_begun = culprit is not None and self._is_begun(culprit)
        ending = self._drop()
        self._in_flight.clear()
        if culprit is None:
            for request in suspects:
                request.is_suspect = True
            self._suspects.extendleft(reversed(suspects))  # the first one has the next process to itself
            self._waiting.extendleft(reversed([one for one in requests if one not in suspects]))
            return
        reason = reason if is_late else f"{reason}: {ending}"
        late = {"is_late": is_late}
        if "turn" in culprit.content and is_begun:
            culprit.answer.set_result({**(culprit.begun or {}), "lost": reason, **late})
        else:
            again = ", or a turn that was played again" if culprit.past else ""
            method = "reward, or close" if is_begun else f"reset{again}"
            culprit.answer.set_result({"failed": f"{method}: {reason}", **late})

    def _drop(self) -> str:
        child, self._child = self._child, None
        self._known.clear()
        return "" if child is None else child.kill()
