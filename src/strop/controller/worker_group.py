"""The seam between the one driver and the processes that compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from strop.controller.resource_pool import ResourcePool


class WorkerGroup(Protocol):
    """The workers of one role. Their marked methods are called on the group as if on one object."""

    def __init__(
        self,
        *,
        worker_cls: type,
        init_kwargs: Mapping[str, Any],
        resource_pool: ResourcePool | None = None,
        name: str = "",
    ) -> None: ...

    @property
    def world_size(self) -> int:
        """The number of data-parallel ranks."""
        ...

    def shutdown(self) -> None:
        """End the workers and give back what they hold."""
        ...

    def __getattr__(self, name: str) -> Any: ...
