"""How a worker's method is called on a group: marks that every kind of worker group honours."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

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
