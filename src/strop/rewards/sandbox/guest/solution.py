"""The program under test: run it, then serve the calls of the judge's tests. Nothing here is trusted.

The judge (``judge.py``) is in another sandbox. This one has no tests and no expected values, so that a
program gains nothing by reading, changing or killing everything in its reach.
"""

from __future__ import annotations

import os
import signal
import sys
import types
from typing import Any, NoReturn

from .channel import (
    STDIN,
    STDOUT,
    Channel,
    Closed,
    decode,
    encode,
    end_program,
    leave_streams,
    offer_exit,
    read_job,
)

_END = object()


def main(job_descriptor: int) -> None:
    """Run the program, send the names that it defines, and answer requests until the judge is gone."""
    job = read_job(job_descriptor)
    leave_streams()
    offer_exit()
    if child := os.fork():
        _be_process_1(child, (job["questions"], job["answers"]))
    channel = Channel(job["questions"], job["answers"], job["limits"]["output_bytes"])
    channel.send("hello")
    channel.receive()  # the judge has started
    module = types.ModuleType("solution")
    sys.modules["solution"] = module  # needed by dataclasses and pickle
    try:
        exec(compile(job["program"], "<solution>", "exec"), module.__dict__)
        channel.send({"names": [name for name in vars(module) if not name.startswith("__")]})
    except Exception as error:  # noqa: BLE001 - a program may raise anything
        channel.send(_raised(error))
    try:
        Objects(module).serve(channel)
    except Closed:
        os._exit(0)


def _be_process_1(child: int, descriptors: tuple[int, ...]) -> NoReturn:
    """Wait for the program and its orphans, and end with the program, which ends all others.

    The kernel ignores most signals to process 1, so that a program should not be it.
    """
    for descriptor in descriptors:
        os.close(descriptor)
    while os.wait()[0] != child:
        pass
    os._exit(0)


class Objects:
    """Objects that the judge refers to by number; 0 is the program's module."""

    def __init__(self, module: types.ModuleType) -> None:
        self._objects: list[Any] = [module]
        self._interrupted: dict[int, Exception] = {}

    def serve(self, channel: Channel) -> None:
        """Answer requests in a loop."""
        while True:
            request = channel.receive()
            try:
                channel.send({"value": encode(self._answer(request), self._refer)})
            except Closed:
                raise
            except Exception as error:  # noqa: BLE001 - raised again in the judge
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
            case "iter":
                iterator = iter(target)
                return None if iterator is target else iterator
            case _:  # "take"
                return self._take(request["object"], *arguments)

    def _take(self, number: int, count: int) -> list[Any]:
        """Return the next items of an iterator, at most ``count``; none at its end.

        Exceptions come in their turn, after the items before them.
        """
        if number in self._interrupted:
            raise self._interrupted.pop(number)
        items: list[Any] = []
        try:
            while len(items) < count and (item := next(self._objects[number], _END)) is not _END:
                items.append(item)
        except Exception as error:
            if not items:
                raise
            self._interrupted[number] = error
        return items

    def _refer(self, value: Any) -> int:
        self._objects.append(value)
        return len(self._objects) - 1


def _raised(error: Exception) -> dict[str, list[str]]:
    return {"raised": [type(error).__name__, str(error)[:1000]]}


_CHUNK = 1 << 16
_JSON_BYTES = 8  # a byte of output takes up to 6 in JSON


def main_stdin(job_descriptor: int) -> None:
    """Run the program on one input after another, and send each output.

    Each run is a forked process. Stops at the first run that fails. Runs may disturb one another and this
    process, but the expected outputs are not in this sandbox.
    """
    job = read_job(job_descriptor)
    leave_streams()
    offer_exit()
    channel = Channel(-1, job["answers"], _JSON_BYTES * job["most_output"])
    channel.send("hello")
    try:
        code = compile(job["program"], "<solution>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        channel.send({"failure": f"{type(error).__name__}: {error}"[:1000]})
        return
    for given in job["inputs"]:
        answer = _run(code, given, answers=job["answers"], most_output=job["most_output"])
        channel.send(answer)
        if "failure" in answer:
            break
    os._exit(0)  # the interpreter's own end takes longer


def _run(code: types.CodeType, given: str, *, answers: int, most_output: int) -> dict[str, str]:
    for path in (STDIN, STDOUT):
        os.unlink(path)
    with open(STDIN, "wb") as file:
        file.write(given.encode(errors="surrogatepass"))
    os.mkfifo(STDOUT)
    source = os.open(STDIN, os.O_RDONLY)
    reader = os.open(STDOUT, os.O_RDONLY | os.O_NONBLOCK)  # so that it does not wait for a writer
    writer = os.open(STDOUT, os.O_WRONLY)
    os.set_blocking(reader, True)
    child = os.fork()
    if child == 0:
        os.dup2(source, 0)
        os.dup2(writer, 1)
        for descriptor in (source, reader, writer, answers):
            os.close(descriptor)
        _be_the_program(code)
    os.close(source)
    os.close(writer)
    written, is_whole = _read_up_to(reader, most_output)
    os.close(reader)
    if not is_whole:
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not is_whole:
        return {"failure": "it writes too much"}
    if status != 0:
        return {"failure": f"it ended with status {status}"}
    return {"written": written.decode(errors="replace")}


def _be_the_program(code: types.CodeType) -> None:
    """Run the program as ``__main__`` and exit as the interpreter does."""
    status = 0
    try:
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        sys.argv = ["solution.py"]
        exec(code, module.__dict__)
    except SystemExit as error:
        status = 0 if error.code is None else error.code if type(error.code) is int else 1
    except BaseException:  # noqa: BLE001 - a program may raise anything
        status = 1
    if not end_program():
        status = status or 1
    os._exit(status & 0xFF)


def _read_up_to(reader: int, limit: int) -> tuple[bytes, bool]:
    """Read until the end, at most ``limit`` bytes; return the content, and True if it is complete."""
    content = bytearray()
    while chunk := os.read(reader, _CHUNK):
        content += chunk
        if len(content) > limit:
            return bytes(content), False
    return bytes(content), True
