"""Worker groups: the interface between the driver and the processes that compute.

``register`` marks the methods of a worker that a group may call, and how arguments are distributed. The
trainer sees a group only; ``LocalWorkerGroup`` runs its worker in this process (in a thread, if there are
several pools), ``strop.controller.ray`` on a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from strop.config.schema.trainer import RunConfig
from strop.controller.pools import ResourcePool
from strop.controller.threads import PoolThread

Method = TypeVar("Method", bound=Callable[..., Any])

_MARK = "_strop_dispatch"


class Dispatch(Enum):
    """Distribution of a method's arguments and results over the ranks of a group.

    ``ONE_TO_ALL``: every rank runs with the same arguments at the same time and may communicate with the
    other ranks; the result is rank zero's. ``DATA_PARALLEL``: the rows of the first argument, a
    ``DataProto``, are distributed over the data-parallel ranks, in equal numbers (padded) and with balanced
    tokens. A returned ``DataProto`` is joined in the order of the argument, without padding; of any other
    result, rank zero's is returned. Ranks that share sequences (``data_parallel_places``) get the same rows.
    ``RANK_ZERO``: only rank zero runs. It must not wait for other ranks.
    """

    ONE_TO_ALL = "one_to_all"
    DATA_PARALLEL = "data_parallel"
    RANK_ZERO = "rank_zero"


def register(dispatch: Dispatch, *, beside_calls: bool = False) -> Callable[[Method], Method]:
    """Mark a worker's method as callable through a group.

    ``beside_calls``: in a worker process the method runs in a second thread, concurrently with a call in
    flight, even one that hangs. It must be thread-safe and must not communicate with other ranks.
    """

    def mark(method: Method) -> Method:
        setattr(method, _MARK, Mark(dispatch, beside_calls))
        return method

    return mark


@dataclass(frozen=True)
class Mark:
    """The mark that ``register`` sets on a method."""

    dispatch: Dispatch
    beside_calls: bool


def mark_of(worker_cls: type, name: str) -> Mark | None:
    """Return the mark of a method, or of the one that it overrides; None if groups must not call it."""
    methods = (vars(cls).get(name) for cls in worker_cls.__mro__)
    return next((mark for method in methods if (mark := getattr(method, _MARK, None))), None)


def data_parallel_places(worker: Any, rank: int, world_size: int) -> dict[str, tuple[int, int]]:
    """Return, by data-parallel method, the index of this rank's part of the rows and the number of parts.

    A worker whose ranks share rows overrides it by a method ``data_parallel_place(method)``; by default each
    rank has a separate part.
    """
    own = getattr(worker, "data_parallel_place", lambda method: (rank, world_size))
    worker_cls = type(worker)
    marks = {name: mark_of(worker_cls, name) for name in dir(worker_cls)}
    return {
        name: own(name) for name, mark in marks.items() if mark and mark.dispatch is Dispatch.DATA_PARALLEL
    }


def plain_class(worker_cls: Any) -> type:
    """Return the class that ``ray.remote`` has wrapped, or ``worker_cls`` itself."""
    if not hasattr(worker_cls, "__ray_metadata__"):
        return worker_cls
    from strop.controller.ray.ray_private import wrapped_class

    return wrapped_class(worker_cls)


def require_mark(worker_cls: type, name: str, group: str) -> Mark:
    """Return the mark of a method; ``AttributeError`` when it has none."""
    if (mark := mark_of(worker_cls, name)) is None:
        raise AttributeError(f"{group} has no method {name!r} marked with @register")
    return mark


@dataclass(frozen=True)
class Future:
    """The result of a call in flight."""

    get: Callable[[], Any]
    """Function that waits for the result, and raises what the call raised.

    Call it once, and again only after an interrupt.
    """
    is_done: Callable[[], bool] = lambda: True
    """Function that returns True if ``get`` will not wait for the workers."""


class GroupMethod:
    """A worker's method on a group: ``group.method(batch)`` waits, ``group.method.start(batch)`` does not.

    Calls to groups that share processes run in the order in which they were started, except methods marked
    with ``beside_calls``; groups in other pools run concurrently. A keyword argument that is a function is a
    callback: it runs on the driver, possibly in a thread, while a data-parallel method runs on the workers,
    with a row of the method's batch and whatever else the worker passes. All callbacks return before the
    result is available; their exceptions are raised by the call.
    """

    def __init__(self, start: Callable[..., Future]) -> None:
        self.start = start

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Start the call and wait for its result."""
        return self.start(*args, **kwargs).get()


class LocalWorkerGroup:
    """A group of one rank in this process, where a debugger can step into the worker.

    Every dispatch is the plain call: nothing is split, copied or moved. With several pools in the run, each
    has a thread (``strop.controller.threads``), in which the calls to its groups run.
    """

    def __init__(
        self,
        *,
        worker_cls: type,
        init_kwargs: Mapping[str, Any],
        resource_pool: ResourcePool | None = None,
        name: str = "",
        settings: RunConfig | None = None,
    ) -> None:
        worker_cls = plain_class(worker_cls)
        self.name = name or worker_cls.__name__
        self.worker = worker_cls(**init_kwargs)
        self._thread = PoolThread.of(resource_pool)

    @property
    def world_size(self) -> int:
        return 1

    def address_for(self, other: Any) -> str | None:
        """Return None: the groups of other pools are in this process, too."""
        return None

    def nodes_without(self, path: Path) -> list[str]:
        """Return no node: the worker is on the driver's."""
        return []

    def shutdown(self) -> None:
        """Drop the worker and its model; end the calls to the groups of its pool, if it has a thread."""
        if self._thread is not None:
            self._thread.end()
        # a traceback may keep the worker alive, which must not keep alive the processes that it has started
        if (close := getattr(self.worker, "close", None)) is not None:
            close()
        self.worker = None

    def __getattr__(self, name: str) -> Any:
        # pickle and copy look up names before __init__ has run, where self.worker would look itself up
        if name.startswith("_") or name == "worker":
            raise AttributeError(name)
        mark = require_mark(type(self.worker), name, self.name)
        method, thread = getattr(self.worker, name), self._thread

        def start(*args: Any, **kwargs: Any) -> Future:
            # Models are loaded one after the other: libraries change state of the process meanwhile.
            if thread is None or mark.beside_calls or name == "init_model":
                result = method(*args, **kwargs)
                return Future(lambda: result)
            future = thread.submit(method, *args, **kwargs)
            return Future(future.result, future.done)

        return GroupMethod(start)
