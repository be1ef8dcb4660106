"""Roles, and the resource pools whose processes they run in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from strop.errors import ConfigError


class Role(Enum):
    """A kind of worker; several roles may share a process."""

    Actor = 0
    Rollout = 1
    ActorRollout = 2  # actor and rollout on the same weights: the hybrid engine
    Critic = 3
    RefPolicy = 4
    RewardModel = 5
    ActorRolloutRef = 6


def name_of(role: Any) -> str:
    """Return the name of a ``Role``, or of a role of one's own: a string, or a member of another enum."""
    return role if isinstance(role, str) else role.name


class ResourcePool:
    """``processes_per_node[i]`` processes on node i. Two pools never share a process."""

    def __init__(self, name: str, processes_per_node: Sequence[int]) -> None:
        self.name = name
        self.processes_per_node = tuple(processes_per_node)
        self.all_of_run: list[ResourcePool] = [self]
        """All pools of the run, including this one: they are placed together or not at all."""

    @property
    def world_size(self) -> int:
        """Total number of processes."""
        return sum(self.processes_per_node)


class ResourcePoolManager:
    """Map each role to its pool; roles with the same pool share its processes (co-located placement).

    Roles of one's own are strings or members of another enum. A pool is given by its processes on each node,
    or by their number on one. Raises ``ConfigError`` when a role names a pool that the specification lacks.
    """

    def __init__(
        self, resource_pool_spec: Mapping[str, Sequence[int] | int], mapping: Mapping[Any, str]
    ) -> None:
        self.pools = {
            name: ResourcePool(name, [spec] if isinstance(spec, int) else spec)
            for name, spec in resource_pool_spec.items()
        }
        self.mapping = dict(mapping)
        for role, name in self.mapping.items():
            if name not in self.pools:
                raise ConfigError(
                    f"role {name_of(role)} is mapped to the pool {name!r}; known: {sorted(self.pools)}"
                )
        used = [pool for name, pool in self.pools.items() if name in self.mapping.values()]
        for pool in used:
            pool.all_of_run = used

    def pool_of(self, role: Any) -> ResourcePool:
        """Return the pool of a role; ``ConfigError`` when the role is not mapped."""
        if role not in self.mapping:
            raise ConfigError(
                f"no resource pool for role {name_of(role)}; mapped: {[name_of(r) for r in self.mapping]}"
            )
        return self.pools[self.mapping[role]]
