"""Pools of roles, and the node of each entry of a pool: pure decisions, on nodes that are only named."""

from __future__ import annotations

import pytest

from strop.controller.pools import ResourcePool, ResourcePoolManager, Role
from strop.controller.ray.cluster import Node, _fit
from strop.errors import ConfigError

from messages import naming


def fit(pools, room):
    made = [ResourcePool(name, spec) for name, spec in pools.items()]
    nodes = [Node(f"node{i}", f"node:{i}", free, free) for i, free in enumerate(room)]
    found = _fit(made, nodes)
    return None if found is None else {pool.name: [node.name for node in found[pool]] for pool in made}


@pytest.mark.parametrize(
    ("pools", "room", "expected"),
    [
        ({"a": [4, 4]}, [4, 8], {"a": ["node0", "node1"]}),
        ({"a": [2, 6]}, [2, 8], {"a": ["node0", "node1"]}),
        ({"train": [4, 4], "rest": [8]}, [8, 4, 4], {"train": ["node1", "node2"], "rest": ["node0"]}),
        ({"a": [2], "b": [2]}, [4], {"a": ["node0"], "b": ["node0"]}),
        ({"a": [2, 2]}, [4], None),
        ({"a": [5]}, [4, 4], None),
        ({"a": [1]}, [], None),
    ],
)
def test_entries_get_nodes_of_their_own_where_they_fit(pools, room, expected):
    assert fit(pools, room) == expected


def test_a_pool_that_no_role_uses_gets_no_places():
    manager = ResourcePoolManager({"used": [2], "idle": [4]}, {Role.Actor: "used"})
    assert [pool.name for pool in manager.pool_of(Role.Actor).all_of_run] == ["used"]


def test_pools_are_found_by_role():
    manager = ResourcePoolManager(
        {"main": [8, 8], "small": 2}, {Role.ActorRollout: "main", Role.Critic: "small"}
    )
    assert manager.pool_of(Role.ActorRollout).world_size == 16
    assert manager.pool_of(Role.Critic).processes_per_node == (2,)
    with pytest.raises(ConfigError, match=naming("RewardModel")):
        manager.pool_of(Role.RewardModel)
    with pytest.raises(ConfigError, match=naming("Critic", "'other'", "'main'")):
        ResourcePoolManager({"main": [1]}, {Role.Critic: "other"})
