"""The program under test: it is run, and then does what the judge's tests ask for. Nothing here is trusted.

Its judge (``judge.py``) is in another sandbox. Here there are no tests and no expected values, so that a
program which reads, changes or ends everything in its reach gains nothing by it.
"""

from __future__ import annotations

import itertools
import os
import sys
import types
from typing import Any

from .begin import offer_exit, read_job, take_over_streams
from .channel import Channel, Closed
from .plain import decode, encode

_ITEMS = 1_000_000


def main(job_descriptor: int) -> None:
    """Say hello, run the program, say which names it defines, and answer until the judge is gone."""
    job = read_job(job_descriptor)
    requests, answers = take_over_streams()
    offer_exit()
    channel = Channel(requests, answers, job["limits"]["output_bytes"])
    channel.send("hello")
    module = types.ModuleType("solution")
    sys.modules["solution"] = module  # dataclasses and pickle look it up
    try:
        exec(compile(job["program"], "<solution>", "exec"), module.__dict__)
        channel.send({"names": [name for name in vars(module) if not name.startswith("__")]})
    except Exception as error:  # noqa: BLE001 - a program may raise anything
        channel.send(_raised(error))
    try:
        Objects(module).serve(channel)
    except Closed:
        os._exit(0)


class Objects:
    """The objects that the judge knows by number; 0 is the program's module."""

    def __init__(self, module: types.ModuleType) -> None:
        self._objects: list[Any] = [module]

    def serve(self, channel: Channel) -> None:
        """Answer one request after the other."""
        while True:
            request = channel.receive()
            try:
                channel.send({"value": encode(self._answer(request), self._refer)})
            except Closed:
                raise
            except Exception as error:  # noqa: BLE001 - it is the judge's tests that catch it
                channel.send(_raised(error))

    def _answer(self, request: dict[str, Any]) -> Any:
        target = self._objects[request["object"]]
        arguments = decode(request["arguments"], self._objects.__getitem__)
        match request["action"]:
            case "get":
                return getattr(target, *arguments)
            case "set":
                return setattr(target, *arguments)
            case "call":
                positional, named = arguments
                return target(*positional, **named)
            case _:  # "items"
                return list(itertools.islice(target, _ITEMS))

    def _refer(self, value: Any) -> int:
        self._objects.append(value)
        return len(self._objects) - 1


def _raised(error: Exception) -> dict[str, list[str]]:
    return {"raised": [type(error).__name__, str(error)[:1000]]}
