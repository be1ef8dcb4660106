"""The process that runs episodes: ``python -m strop.environments.child LIFELINE MEMORY``, of ``pool``.

Pipes, lifeline and memory limit are those of ``strop.rewards.worker.child``. The first request is
``sys.path`` and the pickled blueprint; each further one asks for a turn of an episode, or for its end.
Requests are answered at once, in any order: coroutines run on one event loop, other functions in a thread of
their episode. An episode that this process does not have is made, and its earlier turns are played again.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import IO, Any

from strop.environments.episode import Blueprint, Episode, in_one_line
from strop.rewards.arguments import PlayedTurn
from strop.rewards.worker.child import receive, send, streams

_STACK_BYTES = 1 << 20  # the limit of memory counts the stacks of all threads


def main() -> None:
    """Redirect the standard streams, end with the starter, and serve until the requests end."""
    threading.stack_size(_STACK_BYTES)
    requests, answers, _ = streams()
    messages = receive(requests)
    if (setup := next(messages, None)) is None:
        return
    try:
        sys.path[:], pickled = setup
        blueprint: Blueprint = pickle.loads(pickled)  # needs the sender's sys.path
    # A user's module may raise anything; the starter reports it.
    except BaseException:  # noqa: BLE001
        send(answers, {"status": "raised", "error": traceback.format_exc()[-8000:]})
        return
    send(answers, {"status": "ready", "error": ""})
    asyncio.run(_serve(blueprint, messages, answers))


async def _serve(blueprint: Blueprint, messages: Any, answers: IO[str]) -> None:
    loop, arrived = asyncio.get_running_loop(), asyncio.Queue()
    live: dict[str, _Live] = {}

    def read() -> None:
        for message in messages:
            loop.call_soon_threadsafe(arrived.put_nowait, message)
        loop.call_soon_threadsafe(arrived.put_nowait, None)

    async def respond(request: Mapping[str, Any]) -> None:
        send(answers, {"token": request["token"], **await _answer(blueprint, live, request)})

    threading.Thread(target=read, daemon=True).start()
    running = set()
    while (message := await arrived.get()) is not None:
        running.add(task := loop.create_task(respond(message)))
        task.add_done_callback(running.discard)


class _Live:
    """An episode with its thread."""

    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        self._thread: ThreadPoolExecutor | None = None
        self.n_turns = 0
        self.text = ""
        """What ``reset`` returned."""

    async def run(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """Return the function's result; functions that are no coroutines run in the episode's thread."""
        if inspect.iscoroutinefunction(function):
            return await function(**arguments)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1)
        found = await asyncio.get_running_loop().run_in_executor(self._thread, partial(function, **arguments))
        return await found if inspect.isawaitable(found) else found

    def end(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    async def turn(self, turn: Mapping[str, Any]) -> dict[str, Any]:
        """Play a turn: {texts, errors} for calls, {messages} without, and done."""
        number, self.n_turns = self.n_turns, self.n_turns + 1
        if turn.get("skip"):  # its process was lost, and it is not tried again
            return {}
        if turn["calls"]:
            texts, errors = await self.episode.call(turn["calls"], self.run)
            return {"texts": texts, "errors": errors, "done": self.episode.done}
        try:
            messages = await self.episode.respond(turn["text"], number, self.run)
        # User code may raise anything.
        except Exception as error:  # noqa: BLE001
            found = in_one_line(error)
            return {
                "messages": [{"role": "user", "content": found}],
                "errors": [found],
                "done": self.episode.done,
            }
        return {"messages": messages, "errors": [], "done": self.episode.done}


async def _answer(blueprint: Blueprint, live: dict[str, _Live], request: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a request: past (results of turns that are played again, from ``first``), and the result.

    ``failed`` in its place is the error of a method that is no tool.
    """
    name, past = request["episode"], []
    try:
        if name not in live:
            made = _Live(Episode(blueprint, request["row"]))
            made.text = await made.episode.begin(request["seed"], made.run)
            live[name] = made
        first = live[name].n_turns
        past = [await live[name].turn(turn) for turn in request["past"]]
        played = {"first": first, "past": past}
        if "begin" in request:
            return {**played, "text": live[name].text}
        if "turn" in request:
            return {**played, **await live[name].turn(request["turn"])}
        ended = live.pop(name)
        turns = [PlayedTurn(**turn) for turn in request["turns"]]
        try:
            rewards = await ended.episode.reward(request["values"], turns, ended.run)
        finally:
            ended.end()
        return {**played, "rewards": rewards}
    # User code may raise anything; SystemExit and the like end this process.
    except Exception as error:  # noqa: BLE001
        if (broken := live.pop(name, None)) is not None:
            broken.end()
        return {"past": past, "failed": in_one_line(error), "traceback": traceback.format_exc()[-4000:]}


if __name__ == "__main__":
    main()
