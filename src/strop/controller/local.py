"""One worker in this process: the default, and the one that a debugger can step into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strop.controller.dispatch import dispatch_of
from strop.controller.resource_pool import ResourcePool


class LocalWorkerGroup:
    """A group of one rank. Every dispatch is then the plain call: nothing is split, copied or moved."""

    def __init__(
        self,
        *,
        worker_cls: type,
        init_kwargs: Mapping[str, Any],
        resource_pool: ResourcePool | None = None,
        name: str = "",
    ) -> None:
        self.name = name or worker_cls.__name__
        self.worker = worker_cls(**init_kwargs)

    @property
    def world_size(self) -> int:
        """Always 1."""
        return 1

    def shutdown(self) -> None:
        """Drop the worker, and with it its model."""
        self.worker = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "worker":
            raise AttributeError(name)
        if dispatch_of(type(self.worker), name) is None:
            raise AttributeError(f"{self.name} has no method {name!r} that is marked for worker groups")
        return getattr(self.worker, name)
