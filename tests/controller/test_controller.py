from __future__ import annotations

import pytest

from strop.controller.group import Dispatch, LocalWorkerGroup, Mark, mark_of, register
from strop.controller.pools import ResourcePoolManager, Role
from strop.errors import ConfigError

from messages import naming


class Counter:
    def __init__(self, start: int) -> None:
        self.value = start

    @register(Dispatch.DATA_PARALLEL)
    def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    def unmarked(self) -> int:
        return self.value


def test_a_local_group_calls_marked_methods_in_this_process():
    group = LocalWorkerGroup(worker_cls=Counter, init_kwargs={"start": 5}, name="counter")
    assert group.world_size == 1
    assert group.add(2) == 7
    assert group.worker.value == 7


def test_unmarked_and_unknown_methods_are_not_for_groups():
    group = LocalWorkerGroup(worker_cls=Counter, init_kwargs={"start": 5}, name="counter")
    for name in ("unmarked", "nothing"):
        with pytest.raises(AttributeError, match=naming("counter", f"'{name}'")):
            getattr(group, name)


def test_a_group_that_was_shut_down_holds_no_worker():
    group = LocalWorkerGroup(worker_cls=Counter, init_kwargs={"start": 5})
    group.shutdown()
    assert group.worker is None


def test_marks_are_read_from_the_class():
    assert mark_of(Counter, "add") == Mark(Dispatch.DATA_PARALLEL, beside_calls=False)
    assert mark_of(Counter, "unmarked") is None


def test_pools_are_found_by_role():
    manager = ResourcePoolManager(
        {"main": [8, 8], "small": [2]}, {Role.ActorRollout: "main", Role.Critic: "small"}
    )
    assert manager.pool_of(Role.ActorRollout).world_size == 16
    assert manager.pool_of(Role.Critic).processes_per_node == (2,)
    with pytest.raises(ConfigError, match=naming("RewardModel")):
        manager.pool_of(Role.RewardModel)


def test_a_role_on_an_unknown_pool_is_an_error_at_once():
    with pytest.raises(ConfigError, match=naming("Critic", "'other'", "'main'")):
        ResourcePoolManager({"main": [1]}, {Role.Critic: "other"})
