"""How a worker's method is called on a group: marks that every kind of worker group honours."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])
_MARK = "_strop_dispatch"


class Dispatch(Enum):
    """What happens to a method's arguments and results when a group has several ranks.

    ``ONE_TO_ALL``: every rank gets the same arguments; the results of all are a list reduced to rank zero's.
    ``DATA_PARALLEL``: the ``DataProto`` argument is split over the ranks by rows, results are joined.
    ``RANK_ZERO``: only rank zero is called.
    """

    ONE_TO_ALL = "one_to_all"
    DATA_PARALLEL = "data_parallel"
    RANK_ZERO = "rank_zero"


def register(dispatch: Dispatch) -> Callable[[Method], Method]:
    """Mark a worker's method as callable through a group."""

    def mark(method: Method) -> Method:
        setattr(method, _MARK, dispatch)
        return method

    return mark


def dispatch_of(worker_cls: type, name: str) -> Dispatch | None:
    """The mark of a method, or None when it is not for groups to call."""
    return getattr(getattr(worker_cls, name, None), _MARK, None)
