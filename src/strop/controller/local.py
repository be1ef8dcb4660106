"""One worker in this process: the default, and the one that a debugger can step into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.config.schema.trainer import RunConfig
from strop.controller.dispatch import require_dispatch
from strop.controller.resource_pool import ResourcePool
from strop.controller.worker_group import GroupMethod


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
