"""A thread for each pool of a run in one process, so that its groups work at the same time."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakKeyDictionary

import torch

from strop.controller.pools import ResourcePool

_THREADS: WeakKeyDictionary[ResourcePool, PoolThread] = WeakKeyDictionary()


class PoolThread:
    """The thread of a pool: runs the calls to its groups in the order in which they were started."""

    def __init__(self, pool: ResourcePool) -> None:
        # for each thread's operations: without it every pool would use all cores
        own_threads = max(torch.get_num_threads() // len(pool.all_of_run), 1)
        self._executor = ThreadPoolExecutor(1, pool.name, torch.set_num_threads, (own_threads,))
        self._running: int | None = None

    @classmethod
    def of(cls, pool: ResourcePool | None) -> PoolThread | None:
        """Return the pool's thread; None if the run has one pool: its calls run in the caller's thread."""
        if pool is None or len(pool.all_of_run) == 1:
            return None
        if pool not in _THREADS:
            _THREADS[pool] = cls(pool)
        return _THREADS[pool]

    def submit(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> ThreadFuture[Any]:
        """Run ``call`` after the calls submitted before."""
        return self._executor.submit(self._run, call, *args, **kwargs)

    def _run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._running = threading.get_ident()
        try:
            return call(*args, **kwargs)
        finally:
            self._running = None

    def end(self) -> None:
        """Cancel the calls that wait, interrupt the one that runs, and join the thread."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        if (running := self._running) is not None:
            # Raised at the thread's next Python instruction: a generation takes minutes, a layer does not.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(running), ctypes.py_object(KeyboardInterrupt)
            )
        self._executor.shutdown(wait=True)
