"""The process that runs episodes: ``python -m strop.environments.child LIFELINE MEMORY``, of ``pool``.

Pipes, lifeline and memory limit are those of ``strop.rewards.worker.child``. The first request is
``sys.path`` and the pickled blueprint; each further one begins an episode, in which it plays earlier turns
again, plays its next turn, or ends it. Requests are answered at once, in any order: coroutines run on one
event loop, other functions in a thread of their episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import pickle
import re
import resource
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import IO, Any

from strop.environments.episode import Blueprint, Episode, in_one_line
from strop.errors import traceback_of
from strop.rewards.arguments import PlayedTurn
from strop.rewards.worker.child import STACK_BYTES, arriving, end_fork, is_lack_of_memory, send, serve_many


async def _serve(blueprint: Blueprint, messages: Any, answers: IO[str]) -> None:
    live: dict[str, _Live] = {}

    async def respond(request: Mapping[str, Any]) -> None:
        try:
            send(answers, {"token": request["token"], **await _answer(blueprint, live, request)})
        # No memory is left, say: an answer that never comes would cost the deadline.
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            os._exit(1)

    running = set()
    async for message in arriving(messages):
        running.add(task := asyncio.create_task(respond(message)))
        task.add_done_callback(running.discard)


def _allow_stacks(threads: int) -> None:
    """Raise the limit of memory by the stacks of threads, which count whole, and are hardly touched."""
    if memory_mb := int(sys.argv[2]):
        now, most = resource.getrlimit(resource.RLIMIT_DATA)
        needed = (memory_mb << 20) + threads * STACK_BYTES
        with contextlib.suppress(ValueError):  # above a limit of the system's
            resource.setrlimit(resource.RLIMIT_DATA, (max(now, needed), most))


class _Live:
    """An episode with its thread: an object of a library, as of sqlite3, may be bound to one."""

    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        self._thread = ThreadPoolExecutor(1)

    async def run(self, function: Callable[..., Any], /, **arguments: Any) -> Any:
        """Return the function's result; functions that are no coroutines run in the episode's thread."""
        try:
            if inspect.iscoroutinefunction(function):
                return await function(**arguments)
            call = partial(_outcome, partial(function, **arguments))
            found, error = await asyncio.get_running_loop().run_in_executor(self._thread, call)
            if error is not None:
                raise error
            return await found if inspect.isawaitable(found) else found
        except BaseException as error:
            _end_without_memory(error)
            if re.search(r"\b(same|different) thread\b", in_one_line(error)):
                error.add_note("`async def` methods run in another thread than others: make all one kind")
            raise
        finally:
            end_fork()

    async def end(self) -> None:
        """Close the environment and end the thread; errors are printed."""
        try:
            await self.episode.close(self.run)
        # User code may raise anything.
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        self._thread.shutdown(wait=False)


def _outcome(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Return a call's result, or what it raised: a future takes neither StopIteration nor CancelledError."""
    try:
        return call(), None
    except BaseException as error:  # noqa: BLE001 - user code may raise anything
        return None, error
    finally:
        end_fork()


def _end_without_memory(error: BaseException) -> None:
    """End this process if it has exceeded its limit of memory: other episodes would fail, too."""
    if int(sys.argv[2]) and is_lack_of_memory(error):
        os.write(2, f"it exceeded environment.memory_limit_mb={sys.argv[2]}\n".encode())
        os._exit(1)


async def _answer(blueprint: Blueprint, live: dict[str, _Live], request: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a request, which begins an episode, plays a turn, or ends it.

    ``failed`` in place of the result is the error of a method that is no tool; it ends the episode.
    """
    name = request["episode"]
    try:
        if "turn" in request:
            return await live[name].episode.turn(request["turn"], live[name].run)
        if "end" in request:
            return {"rewards": await _rewards(live[name], **request["end"])}
        text = None
        if name not in live:
            live[name] = _Live(Episode(blueprint, request["row"]))
            _allow_stacks(len(live))
            text = await live[name].episode.begin(request["seed"], live[name].run)
        past = [await live[name].episode.turn(turn, live[name].run) for turn in request["past"]]
        return {"text": text, "first": request["first"], "past": past}
    # User code may raise anything.
    except BaseException as error:  # noqa: BLE001
        request = {"end": None}
        return {"failed": in_one_line(error), "traceback": traceback_of(error)}
    finally:
        if "end" in request:
            await live.pop(name).end()


async def _rewards(ended: _Live, turns: Sequence[Any], values: Mapping[str, Any] | None) -> Any:
    """Return the rewards of an episode; None for a lost one, which has no ``values``."""
    if values is None:
        return None
    return await ended.episode.reward(values, [PlayedTurn(**turn) for turn in turns], ended.run)


if __name__ == "__main__":
    serve_many(pickle.loads, _serve)
