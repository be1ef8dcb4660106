"""The seam between the one driver and the processes that compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, TypeVar

from strop.config.schema.trainer import RunConfig
from strop.controller.pools import ResourcePool

# How a worker's method is called on a group: marks that every kind of worker group honours.

Method = TypeVar("Method", bound=Callable[..., Any])

_MARK = "_strop_dispatch"

_BESIDE_CALLS = "_strop_beside_calls"


class Dispatch(Enum):
    """What happens to a method's arguments and results when a group has several ranks.

    ``ONE_TO_ALL``: every rank gets the same arguments and runs at the same time, so that the method may talk
    to the other ranks; rank zero's result is the group's.
    ``DATA_PARALLEL``: the rows of the first argument, a ``DataProto``, are spread over the data-parallel
    ranks, in equal numbers and with their tokens balanced; what is missing for equal numbers is padded. A
    ``DataProto`` that comes back is put together in the order of the argument, without the padding; of any
    other result rank zero's counts. Ranks that share data (``data_parallel_places``) get the same rows.
    ``RANK_ZERO``: only rank zero is called. It must not wait for other ranks.
    """

    ONE_TO_ALL = "one_to_all"
    DATA_PARALLEL = "data_parallel"
    RANK_ZERO = "rank_zero"


def register(dispatch: Dispatch, *, beside_calls: bool = False) -> Callable[[Method], Method]:
    """Mark a worker's method as callable through a group.

    ``beside_calls``: where workers have processes of their own, it runs in a second thread and is answered
    while a call is under way, also one that hangs. It must bear that, and not talk to other ranks.
    """

    def mark(method: Method) -> Method:
        setattr(method, _MARK, dispatch)
        setattr(method, _BESIDE_CALLS, beside_calls)
        return method

    return mark


def dispatch_of(worker_cls: type, name: str) -> Dispatch | None:
    """The mark of a method, or None when it is not for groups to call."""
    return getattr(getattr(worker_cls, name, None), _MARK, None)


def runs_beside_calls(worker_cls: type, name: str) -> bool:
    """Whether a method was marked with ``beside_calls``."""
    return getattr(getattr(worker_cls, name, None), _BESIDE_CALLS, False)


def data_parallel_places(worker: Any, rank: int, world_size: int) -> dict[str, tuple[int, int]]:
    """By data-parallel method: the part of the rows that this rank gets, and how many parts there are.

    A worker whose ranks share rows says so by a method ``data_parallel_place(method)``; of any other each
    rank gets a part of its own.
    """
    own = getattr(worker, "data_parallel_place", lambda method: (rank, world_size))
    names = [name for name in dir(type(worker)) if dispatch_of(type(worker), name) is Dispatch.DATA_PARALLEL]
    return {name: own(name) for name in names}


def require_dispatch(worker_cls: type, name: str, group: str) -> Dispatch:
    """The mark of a method; ``AttributeError`` when it has none."""
    if (dispatch := dispatch_of(worker_cls, name)) is None:
        raise AttributeError(f"{group} has no method {name!r} that is marked for worker groups")
    return dispatch


class Future(Protocol):
    """The result of a call that was started."""

    def get(self) -> Any:
        """Wait for it; raises what the call raised."""
        ...


class GroupMethod:
    """A worker's method, on a group: ``group.method(batch)`` waits, ``group.method.start(batch)`` does not.

    Calls to groups that share processes run one after another in the order in which they were started, but
    for methods marked with ``beside_calls``; groups in other pools run at the same time. A keyword argument
    that is a function is called here while a data-parallel method runs there, possibly in a thread: with a
    row of the method's batch, and what else the worker tells of it. All of it is told before the result is
    there; what the function raises, the call raises.
    """

    def __init__(self, start: Callable[..., Future]) -> None:
        self.start = start

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Start the call and wait for its result."""
        return self.start(*args, **kwargs).get()


class WorkerGroup(Protocol):
    """The workers of one role. Their marked methods are called on the group as if on one object."""

    def __init__(
        self,
        *,
        worker_cls: type,
        init_kwargs: Mapping[str, Any],
        resource_pool: ResourcePool | None = None,
        name: str = "",
        settings: RunConfig | None = None,
    ) -> None: ...

    @property
    def world_size(self) -> int:
        """The number of processes."""
        ...

    def nodes_without(self, path: Path) -> list[str]:
        """The nodes of this group that do not see a file which the driver has written."""
        ...

    def shutdown(self) -> None:
        """End the workers and give back what they hold."""
        ...

    def __getattr__(self, name: str) -> Any: ...


# One worker in this process: the default, and the one that a debugger can step into.


@dataclass(frozen=True)
class Done:
    """A call in this process has its result as soon as it is started."""

    result: Any

    def get(self) -> Any:
        """The result."""
        return self.result


class LocalWorkerGroup:
    """A group of one rank. Every dispatch is then the plain call: nothing is split, copied or moved."""

    def __init__(
        self,
        *,
        worker_cls: type,
        init_kwargs: Mapping[str, Any],
        resource_pool: ResourcePool | None = None,
        name: str = "",
        settings: RunConfig | None = None,
    ) -> None:
        self.name = name or worker_cls.__name__
        self.worker = worker_cls(**init_kwargs)

    @property
    def world_size(self) -> int:
        """Always 1."""
        return 1

    def nodes_without(self, path: Path) -> list[str]:
        """None: the worker is where the driver is."""
        return []

    def shutdown(self) -> None:
        """Drop the worker, and with it its model."""
        self.worker = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "worker":
            raise AttributeError(name)
        require_dispatch(type(self.worker), name, self.name)
        method = getattr(self.worker, name)
        return GroupMethod(lambda *args, **kwargs: Done(method(*args, **kwargs)))
