"""The process that runs agent programs: ``python -m strop.agents.child LIFELINE MEMORY``, of ``program``.

Pipes, lifeline and memory limit are those of ``strop.rewards.worker.child``. The first request is
``sys.path`` and the pickled program; each further one starts it for a session, or ends it. Coroutines run on
one event loop, other functions in a thread each, commands in a process each.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import select
import subprocess
import tempfile
import threading
import traceback
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

from strop.environments.episode import in_one_line, plain
from strop.errors import traceback_of
from strop.process_tree import kill_marked
from strop.rewards.arguments import Function
from strop.rewards.scorer import Scorer, outcome_of
from strop.rewards.worker.child import arriving, end_fork, send, serve_many

_LONGEST_OUTPUT = 1 << 20
_MOST_THREADS = 4096
_MARK = "STROP_AGENT"
"""Environment variable of a command and what it starts, with a unique value."""


def _program(pickled: bytes, command: str, host: str) -> Function | str:
    for name in ("NO_PROXY", "no_proxy"):  # the endpoint is reached whatever proxy the shell has
        direct = (os.environ.get(name, ""), host, "127.0.0.1", "localhost", "::1")
        os.environ[name] = ",".join(filter(None, direct))
    return command or Function(pickle.loads(pickled), "agent.path")


async def _serve(program: Function | str, messages: Any, answers: IO[str]) -> None:
    loop = asyncio.get_running_loop()
    # lockstep waits for all programs: with fewer threads, as by default, some would never ask
    loop.set_default_executor(ThreadPoolExecutor(_MOST_THREADS))
    running: dict[str, asyncio.Task[None]] = {}

    async def play(name: str, values: Mapping[str, Any]) -> None:
        send(answers, {"token": name, "begun": True})
        try:
            is_command = isinstance(program, str)
            found = _outcome(await (_command(program, values) if is_command else _call(program, values)))
        except asyncio.CancelledError:
            if name not in running:  # it was ended
                raise
            found = {"error": "error: CancelledError", "traceback": ""}
        # User code may raise anything, SystemExit included.
        except BaseException as error:  # noqa: BLE001
            found = {"error": in_one_line(error), "traceback": traceback_of(error)}
        end_fork()
        try:
            send(answers, {"token": name, **found})
        except BaseException:  # noqa: BLE001 - an answer that never comes would cost the session's time
            traceback.print_exc()
            os._exit(1)

    async def beat() -> None:
        while True:
            if running:  # else nobody reads
                send(answers, {"token": "", "begun": True})
            await asyncio.sleep(1)

    beating = loop.create_task(beat())
    async for name, values in arriving(messages):
        if values is None:
            if (task := running.pop(name, None)) is not None:
                task.cancel()
            continue
        running[name] = task = loop.create_task(play(name, values))
        task.add_done_callback(lambda _, name=name: running.pop(name, None))
    for task in (beating, *running.values()):
        task.cancel()


async def _call(function: Function, values: Mapping[str, Any]) -> Any:
    """Return the function's result; functions that are no coroutines run in a thread of their own."""
    arguments = function.arguments(values)
    if function.is_async:
        return await function.function(**arguments)
    found = await _in_thread(lambda: function.function(**arguments))
    return await found if hasattr(found, "__await__") else found


async def _in_thread(work: Callable[[], Any]) -> Any:
    """Return what ``work`` returns in a thread of its own, or raise what it raises."""
    loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def run() -> None:
        found = error = None
        try:
            found = work()
        except BaseException as raised:  # noqa: BLE001 - user code may raise anything
            error = raised
        end_fork()

        def settle() -> None:
            if not done.done():
                done.set_result((found, error))

        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle)

    threading.Thread(target=run, daemon=True).start()
    found, error = await done
    if error is not None:
        raise error
    return found


async def _command(command: str, values: Mapping[str, Any]) -> str:
    """Return the standard output of a command; ``RuntimeError`` if its status is not 0."""
    own = {"OPENAI_BASE_URL": values["base_url"], "OPENAI_API_KEY": values["api_key"]}
    row, mark = json.dumps(values["row"], ensure_ascii=False, default=plain), uuid.uuid4().hex
    environment = {**os.environ, **own, "OPENAI_API_BASE": own["OPENAI_BASE_URL"], _MARK: mark}
    try:
        # not asyncio's: that waits for whatever holds the pipe open
        status, output = await _in_thread(lambda: _run(command, row, environment))
    finally:
        await asyncio.to_thread(kill_marked, mark, _MARK)
    if status:
        raise RuntimeError(f"the command ended with status {status}")
    return output.decode(errors="replace").rstrip("\n")


def _run(command: str, row: str, environment: Mapping[str, str]) -> tuple[int, bytes]:
    """Run a command to its end; return its status, and the first MiB of its output.

    It is in this process's group, which ends with the run.
    """
    with tempfile.TemporaryFile() as given:  # a command need not read it
        given.write(row.encode() + b"\n")
        given.seek(0)
        process = subprocess.Popen(
            command, shell=True, stdin=given, stdout=subprocess.PIPE, env=dict(environment)
        )
    assert process.stdout is not None
    output, pipe = bytearray(), process.stdout.fileno()
    source = select.poll()  # select.select takes no descriptor above 1023
    source.register(pipe, select.POLLIN)
    with process.stdout:
        while True:
            has_ended = process.poll() is not None
            if source.poll(0 if has_ended else 50):
                if not (piece := os.read(pipe, 1 << 16)):
                    break
                output += piece[: _LONGEST_OUTPUT - len(output)]
            elif has_ended:
                break
    return process.wait(), bytes(output)


def _outcome(value: Any) -> dict[str, Any]:
    """Return a program's result as JSON: a text, or a score with its parts.

    Raises ``TypeError`` or ``ValueError`` for others.
    """
    if value is None or isinstance(value, str):
        return {"response": None if value is None else value.encode(errors="replace").decode()}
    expected = "expected a text, or a score as a reward function returns it"
    try:
        found = Scorer.checked(outcome_of(value))
    except (TypeError, ValueError) as error:
        raise TypeError(f"the program returned {value!r:.80}: {error}; {expected}") from error
    if found.error or found.score is None:
        raise ValueError(f"the program returned {value!r:.80}: {expected}, finite and below 3e38")
    return {"score": found.score, "parts": found.parts}


if __name__ == "__main__":
    serve_many(_program, _serve)
