"""The event loop of a scoring process, for async functions."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from strop.rewards.scorer import Scorer
from strop.rewards.worker.child import failed, unpack
from strop.rewards.worker.records import Outcome, timed_out

Answer = Callable[[Sequence[str], Sequence[Outcome]], None]


def serve_on_loop(
    scorer: Scorer,
    messages: Iterator[Any],
    answer: Answer,
    memory_mb: int,
    timeout_s: float,
    max_concurrency: int,
) -> None:
    """Score the messages in their order, ``max_concurrency`` at the same time, until they end.

    All of them share one event loop. A call that takes longer than ``timeout_s`` is cancelled. Generators of
    random numbers are not seeded: samples take turns.
    """

    async def respond(message: Any) -> None:
        tokens, contents = unpack(message)
        outcomes: Outcome | list[Outcome]
        await places.acquire()  # in the order of the messages
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                samples = [pickle.loads(content) for content in contents]
                if scorer.is_batch:
                    outcomes = await scorer.score_all(samples, limit=max_concurrency)
                else:
                    outcomes = await scorer.score(samples[0])
        # User code may raise anything; a bad sample must not end the process.
        except BaseException as error:
            if ending:
                raise
            if limit.expired():
                outcomes = timed_out(timeout_s, batch=len(tokens) if scorer.is_batch else None)
            else:
                outcomes = failed(error, memory_mb)
        with contextlib.suppress(Exception):  # the scorer may have closed or replaced them
            sys.stdout.flush()
            sys.stderr.flush()
        answer(tokens, outcomes if isinstance(outcomes, list) else [outcomes] * len(tokens))
        places.release()

    ending, places = False, asyncio.Semaphore(max_concurrency)

    async def serve() -> None:
        nonlocal ending
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue()

        def read() -> None:
            for message in messages:
                loop.call_soon_threadsafe(arrived.put_nowait, message)
            loop.call_soon_threadsafe(arrived.put_nowait, None)

        threading.Thread(target=read, daemon=True).start()
        running = set()
        while (message := await arrived.get()) is not None:
            running.add(task := loop.create_task(respond(message)))
            task.add_done_callback(running.discard)
        ending = True

    asyncio.run(serve())
