"""The seam between the one driver and the processes that compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from strop.config.schema.trainer import RunConfig
from strop.controller.resource_pool import ResourcePool


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
