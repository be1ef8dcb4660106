"""Agent programs, and the processes that run them."""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from strop.config.schema.agent import AgentConfig
from strop.environments.loading import load_object
from strop.errors import ConfigError
from strop.passed import for_process
from strop.rewards.arguments import Function, require_values
from strop.rewards.worker.process import Child

_start_child = partial(Child, module="strop.agents.child", what="agent program", section="agent")
_LONGEST_LINE = 1 << 24  # bytes of an answer
_TICK_S = 0.02
_SILENT_S = 5.0
"""Seconds without a line after which an event loop is taken for blocked: loaded machines are slow."""
_OWN_NAMES = ("row", "base_url", "api_key")
Outcome = dict[str, Any]
"""``response``; ``score`` with ``parts``; ``error`` with ``traceback``; ``lost``: the end of its process."""


@dataclass(frozen=True)
class Program:
    """The agent program of a run, as the rollout's processes get it."""

    pickled: bytes
    command: str
    search_path: list[str]
    named: str
    """The program, as messages name it."""
    required: tuple[str, ...] = ()
    """Parameters that a column has to fill."""

    def require_columns(self, columns: Collection[str]) -> None:
        """Raise ``ConfigError`` if the function has a parameter that is neither known nor a column."""
        require_values(self.named, self.required, {*_OWN_NAMES, *columns})


def load_program(section: AgentConfig) -> Program | None:
    """Load the program that ``agent`` names; None if it names none.

    Raises ``ConfigError`` for a file or a name that is not there, a function that cannot be called by names
    or pickled, and a missing package.
    """
    if not (section.path or section.command):
        return None
    try:
        import aiohttp  # noqa: F401
    except ImportError as error:
        raise ConfigError("agent: the endpoint needs aiohttp: pip install 'strop[agents]'") from error
    if section.command:
        return Program(b"", section.command, list(sys.path), "agent.command")
    assert section.path is not None
    function = load_object(section.path, "agent.path")
    named = f"agent.path={section.path if '.py:' in section.path else function.__name__}"
    required = Function(function, named).required
    remedy = "its module's globals, and make them in the function"
    pickled = for_process(function, f"{named}: the program", remedy)
    return Program(pickled, "", list(sys.path), named, required)


class Started(NamedTuple):
    """A program that was started."""

    process: _Process
    name: str

    def stop(self, reason: str) -> bool:
        """End it; return False if its process must be, where a coroutine blocks all others.

        The outcome of each of them is then ``lost``, for this reason.
        """
        if self.process.is_ending:
            return False
        if self.process.is_stuck:
            self.process.kill(f"a coroutine blocked its event loop: {reason}")
            return False
        self.process.stop(self.name)
        return True


COMMANDS_AT_ONCE = 16
"""Not of the cores: with ``trainer.async_steps`` above 1 another number gives other weights."""


class ProgramPool:
    """Run programs in killable processes."""

    def __init__(self, program: Program, settings: AgentConfig) -> None:
        """Start nothing before the first program."""
        setup = pickle.dumps((program.search_path, program.pickled, program.command, settings.host))
        limit = settings.memory_limit_mb
        self._processes = [_Process(setup, limit) for _ in range(settings.processes)]
        self.concurrency: int | None = settings.concurrency
        if program.command and self.concurrency is None:
            self.concurrency = COMMANDS_AT_ONCE
        for process in self._processes:
            # a rollout that is dropped, as at the end of ``strop.train``, leaves no process behind
            weakref.finalize(self, process.close).atexit = False
        self._n_started = 0

    def start(self, name: str, values: Mapping[str, Any], ended: Callable[[Outcome], None]) -> Started:
        """Start a program with ``values``.

        ``ended`` is called in another thread, with ``begun`` when its process runs it, and with its outcome
        unless it was ended.
        """
        process = self._processes[self._n_started % len(self._processes)]
        self._n_started += 1
        process.start(name, values, ended)
        return Started(process, name)

    def close(self) -> None:
        for process in self._processes:
            process.close()


class _Process:
    """A process with the thread that talks to it."""

    def __init__(self, setup: bytes, memory_limit_mb: int | None) -> None:
        self._setup, self._memory_limit_mb = setup, memory_limit_mb
        self._arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._running: dict[str, Callable[[Outcome], None]] = {}
        self._child: Child | None = None
        self._n_left = 0
        """Programs that were ended, and whose threads may go on."""
        self._heard_at = 0.0
        """Time of the last line of the process, which writes one in a second while programs run."""
        self._open, self.is_ending = True, False
        self._thread = threading.Thread(target=self._run, name="strop-agents", daemon=True)
        self._thread.start()

    def start(self, name: str, values: Mapping[str, Any], ended: Callable[[Outcome], None]) -> None:
        self._arrived.put((name, dict(values), ended))

    def stop(self, name: str) -> None:
        self._arrived.put((name, None, None))

    @property
    def is_stuck(self) -> bool:
        """True if its event loop stands still."""
        return time.monotonic() - self._heard_at > _SILENT_S

    def kill(self, reason: str) -> None:
        """End the process, and so all programs in it."""
        self.is_ending, self._heard_at = True, math.inf
        self._arrived.put(("", None, reason))

    def close(self) -> None:
        self._arrived.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(10.0)

    def _run(self) -> None:
        while self._open:
            try:
                self._take()
                if self._running:
                    self._receive()
                    if self._n_left and self.is_stuck:  # others would never begin
                        self.kill("a program that was ended blocks their event loop")
                elif self._n_left:  # threads that never end would compute on
                    self._drop()
            # Given to every program that runs, in its caller's thread.
            except BaseException as error:  # noqa: BLE001
                self._end_all({"raised": error})
        self._drop()
        self._end_all({"raised": RuntimeError("the processes of the agent programs are closed")})

    def _take(self) -> None:
        wait = not self._running
        with contextlib.suppress(queue.Empty):
            while True:
                message = self._arrived.get(block=wait)
                wait = False
                if message is None:
                    self._open = False
                    return
                self._post(*message)

    def _post(self, name: str, values: Mapping[str, Any] | None, ended: Any) -> None:
        if values is None:
            if ended is not None:
                self._drop()
                self._end_all({"lost": ended})
                self.is_ending = False
            elif self._running.pop(name, None) is not None and self._child is not None:
                self._n_left += 1
                self._child.lane.post(pickle.dumps((name, None)))
            return
        if not self._running:  # it was silent
            self._heard_at = time.monotonic()
        self._running[name] = ended
        if self._child is None or (len(self._running) == 1 and not self._child.is_alive()):
            self._drop()
            self._heard_at = math.inf  # it has to begin before it is stuck
            self._child = _start_child(self._setup, self._memory_limit_mb, longest_line=_LONGEST_LINE)
        self._child.lane.post(pickle.dumps((name, values)))
        self._child.output.allow_more()

    def _receive(self) -> None:
        child = self._child
        assert child is not None
        try:
            if (line := child.lane.exchange(time.monotonic() + _TICK_S, child.is_alive)) is None:
                return
            answer = json.loads(line)
            self._heard_at = time.monotonic()
            name = answer.pop("token")
            ended = self._running.get(name) if "begun" in answer else self._running.pop(name, None)
        except TimeoutError:
            return
        except EOFError:
            self._end_all({"lost": f"it ended its process: {self._drop()}"})
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            self._drop()
            self._end_all({"lost": "it wrote into its process's pipe"})
        else:
            if ended is not None:
                ended(answer)

    def _end_all(self, outcome: Outcome) -> None:
        running, self._running = self._running, {}
        for ended in running.values():
            ended(outcome)

    def _drop(self) -> str:
        child, self._child = self._child, None
        self._n_left = 0
        return "" if child is None else child.kill()
