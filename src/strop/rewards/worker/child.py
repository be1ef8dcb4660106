"""The process that scores: ``python -m strop.rewards.worker.child LIFELINE MEMORY``, of ``RewardProcess``.

A sample that hangs or crashes costs this process and not the run. Requests arrive on standard input and
answers leave on standard output; the scorer sees an empty standard input, and its prints go to standard
error. Requests are pickles: first ``sys.path``, the pickled scorer, and how it is run, then a token with
pickled ``Sample``s: one, or all of a batch; the outer pickles mark their ends. The answer is a line of JSON
for each sample, with the token of its request: unpickling would let a scorer run code in the run's own
process, and without a token a line that a scorer writes into the pipe would be taken for the answer to the
next sample.

LIFELINE is the descriptor of a pipe to which nothing is written. It closes when the starter ends, even by
SIGKILL, and then this process group is killed.

MEMORY is the limit of the process's data in MiB (0: none), also of each process that it starts. It limits
RLIMIT_DATA (private writable memory) and not RLIMIT_AS: libraries like torch map far more than they use.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import faulthandler
import fcntl
import json
import os
import pickle
import random
import resource
import select
import signal
import sys
import threading
import zlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

from strop.errors import traceback_of
from strop.rewards.arguments import Sample
from strop.rewards.scorer import Outcome, Scorer, run, timed_out

T = TypeVar("T")
Answer = Callable[[str, Sequence[Outcome]], None]

STACK_BYTES = 1 << 20
"""Of a thread in ``serve_many``."""

_F_SETSIG = 10  # Linux; the module fcntl does not name it on Python 3.11
_NEEDED = {name: sys.modules[name] for name in ("builtins", "json", "os", "pickle", "random", "sys")}
_CALLED = [
    (module, name, getattr(module, name))
    for module, name in ((json, "dumps"), (pickle, "load"), (pickle, "loads"))
]
_BUILT_IN = frozenset(vars(builtins))
_OWN_ID = os.getpid()


def main() -> None:
    """Serve until the requests end."""
    serve(*streams())


def streams() -> tuple[IO[bytes], IO[str], int]:
    """Redirect the standard streams, and end with the starter; return requests, answers and MEMORY."""
    follow_to_death(int(sys.argv[1]))
    if memory_mb := int(sys.argv[2]):
        most = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (memory_mb << 20, most))
    with contextlib.suppress(OSError):  # if memory runs out, the kernel should kill this process
        Path("/proc/self/oom_score_adj").write_text("1000")
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    # A child that a scorer forks must not write into the pipe of its parent's answers, nor hold it open.
    os.register_at_fork(after_in_child=lambda: os.dup2(nothing, answers.fileno(), inheritable=False))
    faulthandler.enable()
    return requests, answers, memory_mb


def serve_many(
    make: Callable[..., T], work: Callable[[T, Iterator[Any], IO[str]], Coroutine[Any, Any, None]]
) -> None:
    """Run ``work`` with what ``begun`` returns, for hundreds of functions at once with their connections."""
    import asyncio  # doubles the start time

    threading.stack_size(STACK_BYTES)
    requests, answers, _ = streams()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if (found := begun(requests, answers, make)) is not None:
        asyncio.run(work(*found, answers))


def serve(requests: IO[bytes], answers: IO[str], memory_mb: int) -> None:
    """Answer every request, until the pipe is closed.

    Answers the first one with the status ``ready``, or with ``raised`` and the traceback, and then returns.
    Ends the process, instead of an answer, after a sample whose scorer broke it for the next ones.
    """
    pipes = {descriptor: _identity(descriptor) for descriptor in (requests.fileno(), answers.fileno())}
    found = begun(requests, answers, lambda pickled, *how: (pickle.loads(pickled), *how))
    if found is None:
        return
    (scorer, timeout_s, max_concurrency), messages = found

    def answer(token: str, outcomes: Sequence[Outcome]) -> None:
        with contextlib.suppress(Exception):  # the scorer may have closed or replaced them
            sys.stdout.flush()
            sys.stderr.flush()
        end_fork()
        if broken := _broken(pipes):
            os.write(2, f"the reward function removed or replaced {broken} of its process\n".encode())
            os._exit(1)
        for outcome in outcomes:
            send(answers, {"token": token, **vars(outcome)})

    if scorer.is_async:
        _serve_concurrently(scorer, messages, answer, memory_mb, timeout_s, max_concurrency)
        return
    for token, contents in messages:
        try:
            outcomes = run(_score(scorer, contents))
        # User code may raise anything, SystemExit included; a bad sample must not end the process.
        except BaseException as error:  # noqa: BLE001
            outcomes = [_failed(error, memory_mb)] * len(contents)
        answer(token, outcomes)


async def _score(scorer: Scorer, contents: Sequence[bytes], *, limit: int = 1) -> Sequence[Outcome]:
    """Score the pickled samples of a request; exceptions of the functions propagate."""
    samples: list[Sample] = [pickle.loads(content) for content in contents]
    if not scorer.is_async:  # several samples of an async function share the generators
        _seed_generators(samples[0])
    return (
        await scorer.score_all(samples, limit=limit) if scorer.is_batch else [await scorer.score(samples[0])]
    )


def _serve_concurrently(
    scorer: Scorer,
    messages: Iterator[Any],
    answer: Answer,
    memory_mb: int,
    timeout_s: float,
    max_concurrency: int,
) -> None:
    """Answer requests for async functions on one event loop, ``max_concurrency`` at the same time.

    They are begun in their order. A call that takes longer than ``timeout_s`` is cancelled.
    """
    import asyncio  # doubles the start time

    ending, places = False, asyncio.Semaphore(max_concurrency)

    async def respond(token: str, contents: Sequence[bytes]) -> None:
        await places.acquire()
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                outcomes = await _score(scorer, contents, limit=max_concurrency)
        # User code may raise anything; a bad sample must not end the process.
        except BaseException as error:
            if ending:
                raise
            found = _failed(error, memory_mb)
            if deadline.expired():
                notes = getattr(error.__cause__, "__notes__", ())
                found = timed_out(timeout_s, batch=len(contents) if scorer.is_batch else None, notes=notes)
            outcomes = [found] * len(contents)
        answer(token, outcomes)
        places.release()

    async def serve_all() -> None:
        nonlocal ending
        running = set()
        async for message in arriving(messages):
            running.add(task := asyncio.create_task(respond(*message)))
            task.add_done_callback(running.discard)
        ending = True

    asyncio.run(serve_all())


def end_fork() -> None:
    """End this process if it is a fork, from which user code has returned."""
    if os.getpid() != _OWN_ID:
        os._exit(0)


def _broken(pipes: Mapping[int, tuple[int, int]]) -> str:
    """Return what a scorer took from this process that the next samples need; "" if nothing is missing."""
    if any(sys.modules.get(name) is not module for name, module in _NEEDED.items()):
        return "modules"
    if any(getattr(module, name, None) is not function for module, name, function in _CALLED):
        return "functions of the standard library"
    if not vars(builtins).keys() >= _BUILT_IN:
        return "built-in functions"
    with contextlib.suppress(OSError):  # it is closed
        if all(_identity(descriptor) == identity for descriptor, identity in pipes.items()):
            return ""
    return "descriptors"


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def begun(requests: IO[bytes], answers: IO[str], make: Callable[..., T]) -> tuple[T, Iterator[Any]] | None:
    """Return what ``make`` makes of the first request, after its ``sys.path``, and the further requests.

    None if there is none, or if it raises.
    """
    messages = _received(requests)
    if (setup := next(messages, None)) is None:
        return None
    try:
        sys.path[:], *values = setup
        made = make(*values)  # unpickles, which needs the sender's sys.path
    # A user's module may raise anything; the starter reports it.
    except BaseException as error:  # noqa: BLE001
        send(answers, {"status": "raised", "error": traceback_of(error)})
        return None
    send(answers, {"status": "ready", "error": ""})
    return made, messages


async def arriving(messages: Iterator[Any]) -> AsyncGenerator[Any]:
    """Yield the requests on the event loop, until the pipe is closed."""
    import asyncio

    loop, arrived = asyncio.get_running_loop(), asyncio.Queue()

    def read() -> None:
        for message in messages:
            loop.call_soon_threadsafe(arrived.put_nowait, message)
        loop.call_soon_threadsafe(arrived.put_nowait, None)

    threading.Thread(target=read, daemon=True).start()
    while (message := await arrived.get()) is not None:
        yield message


def _received(requests: IO[bytes]) -> Iterator[Any]:
    with contextlib.suppress(EOFError, pickle.UnpicklingError):  # closed, between messages or within one
        while True:
            yield pickle.load(requests)


def send(answers: IO[str], answer: dict[str, Any]) -> None:
    """Write an answer, as a line of JSON."""
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _failed(error: BaseException, memory_mb: int) -> Outcome:
    """Return the outcome for an exception.

    With a limit of memory, running out of it is a crash: what a library does after that is not defined.
    """
    if memory_mb and is_lack_of_memory(error):
        exceeded = f"the reward function exceeded reward_model.memory_limit_mb={memory_mb}:\n"
        return Outcome("crashed", error=exceeded + traceback_of(error))
    return Outcome("raised", error=traceback_of(error))


def is_lack_of_memory(error: BaseException) -> bool:
    """Return True if the error says that memory ran out."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    of_system = ("allocate memory", "can't start new thread")  # torch's, and of a stack
    return isinstance(error, RuntimeError) and any(text in str(error) for text in of_system)


def _seed_generators(sample: Sample) -> None:
    """Seed by the sample, so that a scorer draws the same random numbers for it in every run."""
    seed = zlib.crc32(repr((sample.data_source, sample.solution_str, sample.ground_truth)).encode())
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):  # imported by the scorer
        numpy.random.seed(seed)


def follow_to_death(lifeline: int) -> None:
    """Kill this process group when the other end of the pipe ``lifeline`` is closed.

    On Linux the kernel does it (F_SETSIG), even while a scorer holds the interpreter's lock, as a hanging
    regular expression does; elsewhere a thread does it.
    """
    threading.Thread(target=_kill_group_when_closed, args=(lifeline,), daemon=True).start()
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # gVisor and the like lack it; the thread remains
            fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
            fcntl.fcntl(lifeline, _F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def _kill_group_when_closed(lifeline: int) -> None:
    poll = select.poll()
    poll.register(lifeline, 0)  # 0: hang-ups are always reported
    poll.poll()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
