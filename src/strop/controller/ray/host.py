"""The process that holds workers: a Ray actor, shared with its device by all roles of a pool.

Calls to its workers run one after another in one thread. Further threads serve the lifetime call (which never
returns), progress reports, methods marked with ``beside_calls``, and the stack of the calling thread when a
call takes too long.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import ray
from ray.exceptions import RayError

from strop.controller.group import data_parallel_places
from strop.controller.ray.handles import Columns, to_array
from strop.controller.ray.wire import Packed, pack, unpack
from strop.controller.rendezvous import PATIENCE, choose_interfaces, open_store
from strop.errors import portable
from strop.passed import PASSED
from strop.protocol import DataProto


@dataclass(frozen=True)
class Reporter:
    """Placeholder of a callback of the driver in the arguments sent to workers."""

    key: str = field(default_factory=lambda: uuid.uuid4().hex)


class Reports:
    """Progress reports of one process's workers, queued by the key of the callback."""

    def __init__(self) -> None:
        self._queues: dict[str, SimpleQueue[tuple[Any, ...] | None]] = {}

    def connect(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return keyword arguments with each ``Reporter`` replaced by a function that enqueues."""

        def enqueue(queue: SimpleQueue[Any], *report: Any) -> None:
            queue.put(report)

        return {
            name: partial(enqueue, self._queue(value.key)) if isinstance(value, Reporter) else value
            for name, value in arguments.items()
        }

    def end(self, arguments: Mapping[str, Any]) -> None:
        """Close the queues of a finished call."""
        for value in arguments.values():
            if isinstance(value, Reporter):
                self._queue(value.key).put(None)

    def fetch(self, key: str) -> tuple[list[tuple[Any, ...]], bool]:
        """Wait for reports; return the callback's arguments since the last fetch, and False when closed."""
        queue, reports = self._queue(key), []
        # blocks until there is one, then takes what has queued up: one message for many reports
        while (arguments := queue.get()) is not None:
            reports.append(arguments)
            if queue.empty():
                return reports, True
        del self._queues[key]
        return reports, False

    def _queue(self, key: str) -> SimpleQueue[tuple[Any, ...] | None]:
        return self._queues.setdefault(key, SimpleQueue())  # atomic


class Listener:
    """Call ``function`` in a thread with the reports of hosts until their calls end.

    The first argument, a row of the rank's part, is mapped to the row of the whole batch (``rows`` by rank);
    reports of padding rows are dropped.
    """

    def __init__(
        self,
        function: Callable[..., None],
        key: str,
        hosts: Mapping[int, Any],
        rows: Mapping[int, Sequence[int]],
    ) -> None:
        self._function, self._key, self._hosts, self._rows = function, key, hosts, rows
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="strop-reports", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the last report, soon after the calls end; raise what the function raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        pending = {host.reports.remote(self._key): rank for rank, host in self._hosts.items()}
        while pending and ray.is_initialized():
            (reference, *_), _ = ray.wait(list(pending))
            rank = pending.pop(reference)
            try:
                reports, may_be_more = ray.get(reference)
            except RayError:  # the process died: the wait for its result raises
                continue
            self._deliver(rank, reports)
            if may_be_more and ray.is_initialized():
                pending[self._hosts[rank].reports.remote(self._key)] = rank

    def _deliver(self, rank: int, reports: Sequence[tuple[Any, ...]]) -> None:
        rows = self._rows[rank]
        for row, *more in reports:
            if row < len(rows) and self._error is None:
                try:
                    self._function(rows[row], *more)
                except Exception as error:  # noqa: BLE001 - a user's error; raised in finish()
                    self._error = error


STACK_SIGNAL = signal.SIGUSR2
"""Writes the stacks of all threads into a file, even while native code holds the interpreter."""
_WATCH = "watch"
_BESIDE = "beside"
_LARGE_BYTES = 1 << 18
"""A rank's column of this size is a separate object of the store."""
_AFTER_THE_DRIVER_S = 60.0
_REACHED_WITHIN = timedelta(seconds=600)
"""In which a rank reaches the store of rank zero; a closed port between machines would not end otherwise."""


class WorkerHost:
    """One process of a pool, on its own GPU where there are GPUs."""

    def __init__(self) -> None:
        faulthandler.enable()
        self._workers: dict[str, Any] = {}
        self._calls_thread = threading.get_ident()
        self._reports = Reports()
        self._store: Any = None

    def prepare(self, module_path: list[str], folder: str, threads: int, gpu: bool) -> dict[str, Any]:
        """Adopt the driver's sys.path, cwd and thread count; return this process's location."""
        for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(name, "1")  # bars would break the driver's live display
        if not gpu:  # Ray hides no GPU from a process that requests none
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        elif os.environ.get("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"):  # then Ray does not choose for it
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, ray.get_gpu_ids()))
        import torch

        sys.path[:] = module_path
        os.chdir(folder)
        torch.set_num_threads(threads)
        self._calls_thread = threading.get_ident()
        context = ray.get_runtime_context()
        logs = [os.path.realpath(f"/proc/self/fd/{number}") for number in (1, 2)]
        self._stacks = Path(logs[1]).with_name(f"stacks-{os.getpid()}.txt").open("w")
        faulthandler.register(STACK_SIGNAL, file=self._stacks, all_threads=True)
        self._phase = Path(logs[1]).with_name(f"phase-{os.getpid()}.txt")
        return {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "ip": ray.util.get_node_ip_address(),
            "node_id": context.get_node_id(),
            "logs": logs,
            "stacks": self._stacks.name,
            "phase": str(self._phase),
            "thread": self._calls_thread,
        }

    def open_store(self, address: str) -> int:
        """Start the rendezvous store of the pool's processes at an address of this node; return its port."""
        self._store, port = open_store(address)
        return port

    def join(
        self, host: str, port: int, rank: int, world_size: int, *, gpu: bool, timeout_s: float | None
    ) -> None:
        """Join the pool's process group through the store that rank zero opened.

        Its timeout exceeds the driver's, because the driver can name the rank that hangs.
        """
        import torch
        import torch.distributed as dist

        if gpu:
            torch.cuda.set_device(0)
        choose_interfaces(host)
        timeout = timedelta(seconds=timeout_s + _AFTER_THE_DRIVER_S) if timeout_s else PATIENCE
        store = self._store or dist.TCPStore(host, port, timeout=min(timeout, _REACHED_WITHIN))
        store.set_timeout(timeout)
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if gpu else "gloo",  # objects are exchanged on the CPU
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )

    def add(self, name: str, worker: bytes, rank: int, world_size: int) -> dict[str, tuple[int, int]]:
        """Construct a worker; return its ``data_parallel_places``."""
        with _portable_errors():
            worker_cls, init_kwargs, functions = pickle.loads(worker)
            PASSED.update(functions)
            made = worker_cls(**init_kwargs, rank=rank, world_size=world_size)
        self._workers[name] = made
        return data_parallel_places(made, rank, world_size)

    def remove(self, name: str) -> None:
        """Drop a worker and its model."""
        self._workers.pop(name, None)

    @ray.method(num_returns=2)
    def call(self, name: str, method: str, packed: Packed, read: Set[str], *objects: Any) -> tuple[Any, Any]:
        """Call a worker's method; return a description of the result, and the bytes of its tensors.

        Descriptions: ("batch", rows, shapes of columns, references of columns in separate objects, the rest
        of the batch), ("value", the value) or ("tensors",), where the second part is the packed value.
        ``read``: names of the columns that the driver has read before.
        """
        args, kwargs = unpack(packed, objects)
        in_order = threading.get_ident() == self._calls_thread
        if in_order:
            self._phase.write_text(f"{name}\n{method}")  # outlives the process, see ``failure.last_phase``
        try:
            with _portable_errors():
                result = getattr(self._workers[name], method)(*args, **self._reports.connect(kwargs))
        finally:
            if in_order:
                self._phase.write_text("")
            self._reports.end(kwargs)
        if isinstance(result, DataProto):
            columns = {column: (to_array(tensor), tensor.dtype) for column, tensor in result.batch.items()}
            shapes = {column: (tensor.shape[1:], tensor.dtype) for column, tensor in result.batch.items()}
            smallest, *others = _objects(columns, read)
            apart = {column: reference for own in others for reference in [ray.put(own)] for column in own}
            return ("batch", len(result), shapes, apart, result.non_tensor_batch, result.meta_info), smallest
        whole, _ = pack(result)
        return (("tensors",), whole) if whole.arrays else (("value", result), None)

    @ray.method(num_returns=2, concurrency_group=_BESIDE)
    def call_beside(
        self, name: str, method: str, packed: Packed, read: Set[str], *objects: Any
    ) -> tuple[Any, Any]:
        """Run a method marked with ``beside_calls`` concurrently with a call in flight; see ``call``."""
        host: Any = self  # Ray's decorator changes the type of methods
        return host.call(name, method, packed, read, *objects)

    def sees(self, path: str) -> bool:
        """Return True if the file exists on this node, in a folder in which this process may write."""
        return Path(path).exists() and os.access(Path(path).parent, os.W_OK)

    @ray.method(concurrency_group=_WATCH)
    def lifetime(self) -> None:
        """Block forever: the pending call fails as soon as the process dies."""
        threading.Event().wait()

    @ray.method(concurrency_group=_WATCH)
    def reports(self, key: str) -> tuple[list[tuple[Any, ...]], bool]:
        """Wait for progress reports; see ``Reports.fetch``."""
        return self._reports.fetch(key)

    @ray.method(concurrency_group=_WATCH)
    def stack(self) -> str:
        """Return the stack of the thread that runs calls."""
        frame = sys._current_frames().get(self._calls_thread)
        stack = traceback.extract_stack(frame) if frame else []
        own = next((i for i, entry in enumerate(stack) if entry.filename == __file__), -1)
        return "".join(traceback.format_list(stack[own + 1 :])) or "(it runs no call)"


def _objects(columns: Columns, read: Set[str]) -> list[Columns]:
    """Group columns into objects of the store, the smallest object first.

    Reading one column fetches its whole object, and every object has an overhead. So a large column is a
    separate object; small columns that the driver reads share one object, and the other small columns
    another.
    """
    objects: dict[Any, Columns] = {}
    for name, (array, dtype) in columns.items():
        key = name if array.nbytes >= _LARGE_BYTES else name in read
        objects.setdefault(key, {})[name] = (array, dtype)
    return sorted(objects.values(), key=lambda own: sum(array.nbytes for array, _ in own.values())) or [{}]


@contextlib.contextmanager
def _portable_errors() -> Generator[None]:
    """Convert errors of the body to ones that can be sent to the driver."""
    try:
        yield
    except Exception as error:
        sendable = portable(error)
        if sendable is error:
            raise
        raise sendable from error.__cause__ or error.__context__


_ACTOR: dict[str, Any] = {
    "max_restarts": 0,  # strop restarts the run, see ``trainer/commands.py``
    "max_task_retries": 0,
    "concurrency_groups": {_WATCH: 8, _BESIDE: 1},  # lifetime takes one of the eight until the end
}

RemoteHost: Any = ray.remote(**_ACTOR)(WorkerHost)
