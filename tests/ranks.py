"""Persistent test processes that form a new gloo process group for each call."""

from __future__ import annotations

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import forked

DEADLINE_S = 600  # beside a busy suite; it ends what would hang for ever


class Ranks:
    """Context manager of ``size`` forked processes.

    Messages are pickled here: ``Connection.send`` would move tensors into shared memory while in use.
    """

    def __init__(self, size: int) -> None:
        self._size = size

    def __enter__(self) -> Ranks:
        self._folder = tempfile.TemporaryDirectory()
        self._calls = 0
        self._processes, self._pipes = [], []
        for _ in range(self._size):
            ours, theirs = forked.CONTEXT.Pipe()
            process = forked.CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._processes.append(process)
            self._pipes.append(ours)
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def run(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call ``function(*arguments)`` on each rank of a new group; return results by rank."""
        self._calls += 1
        store = Path(self._folder.name) / str(self._calls)
        for rank, pipe in enumerate(self._pipes[:world_size]):
            pipe.send_bytes(pickle.dumps((function, arguments, rank, world_size, store)))
        results = []
        for rank, pipe in enumerate(self._pipes[:world_size]):
            if not pipe.poll(DEADLINE_S):
                raise TimeoutError(f"rank {rank} of {world_size} is silent in {function.__name__}")
            results.append(pickle.loads(pipe.recv_bytes()))
        for rank, (failure, _) in enumerate(results):
            if failure is not None:
                raise AssertionError(f"rank {rank} of {world_size}:\n{failure}")
        return [result for _, result in results]


def _serve(pipe: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        function, arguments, rank, world_size, store = pickle.loads(pipe.recv_bytes())
        failure = result = None
        try:
            if world_size > 1:  # one process has no group, as in a local run
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{store}",
                    rank=rank,
                    world_size=world_size,
                    timeout=timedelta(seconds=DEADLINE_S / 2),
                )
                dist.barrier()  # a rank that left the group would fail those that are still joining
            result = function(*arguments)
        except Exception:  # noqa: BLE001 - the test that called is to show it, whatever it is
            failure = traceback.format_exc()
        finally:
            if dist.is_initialized():  # an engine may open a group of one process
                dist.destroy_process_group()
        pipe.send_bytes(pickle.dumps((failure, result)))
