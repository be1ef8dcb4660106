"""Two Ray nodes: which processes start where, and what is reported of the node without the driver."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from strop.errors import ConfigError, WorkerError

from messages import naming
from runs import hashes, make_inputs, metrics, overrides, train
from toys import limit, pools, ray_group

pytestmark = pytest.mark.usefixtures("two_nodes")


@pytest.fixture(autouse=True)
def patience_with_the_other_node(monkeypatch):
    """A process has to start there to read its logs and stacks: longer than 5 s where the cores are busy."""
    monkeypatch.setattr("strop.controller.ray.failure._READ_S", 120.0)


def _other_rank(nodes: list[str]) -> int:
    """Return the rank that is not on the driver's node."""
    return 1 - nodes.index(ray.get_runtime_context().get_node_id())


@pytest.mark.slow
def test_each_entry_of_a_pool_is_a_node_of_its_own():
    group = ray_group(pools(apart=[1, 1])[0])
    assert set(group.nodes()) == {node["NodeID"] for node in ray.nodes()}
    assert group.add(3) == 3
    group.shutdown()
    group = ray_group(pools(together=[2])[0])
    assert len(set(group.nodes())) == 1
    assert len(set(group.pids())) == 2
    group.shutdown()


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        ({"main": [3]}, "main: [3]"),
        ({"main": [1, 1, 1]}, "main: [1, 1, 1]"),
        ({"main": [2, 1], "critic": [2]}, "main: [2, 1], critic: [2]"),
    ],
)
def test_a_demand_for_more_than_there_is_starts_nothing(wanted, named):
    with pytest.raises(ConfigError, match=naming(named)) as caught:
        ray_group(pools(**wanted)[0])
    assert re.search(rf"{os.uname().nodename} \(127\.0\.0\.2\): [012] of 2", str(caught.value))
    groups = ray.util.placement_group_table().values()
    assert not [group for group in groups if group["state"] != "REMOVED"]


def test_nodes_that_do_not_see_a_file_are_named():
    group = ray_group(pools(main=[1, 1])[0])
    other = _other_rank(group.nodes())
    only_here = Path(f"/proc/self/task/{group.pids()[1 - other]}")  # not in any other process
    assert group.nodes_without(only_here) == [f"{os.uname().nodename} (127.0.0.2)"]
    group.shutdown()


def test_the_last_lines_of_a_rank_on_the_other_node_are_reported():
    group = ray_group(pools(main=[1, 1])[0])
    rank = _other_rank(group.nodes())
    group.say("so far so good")
    os.kill(group.pids()[rank], signal.SIGKILL)
    with pytest.raises(WorkerError, match=naming("toy", "so far so good", f"rank {rank} warns")):
        group.pids()


@pytest.mark.slow
def test_the_stack_of_a_rank_on_the_other_node_is_reported():
    group = ray_group(pools(main=[1, 1])[0])
    rank = _other_rank(group.nodes())
    limit(group, 3.0)
    with pytest.raises(WorkerError, match=naming("toy", f"rank {rank}")) as caught:
        group.hold_the_interpreter(rank)
    assert "in hold_the_interpreter" in str(caught.value).split("--- rank")[1]


def test_roles_on_two_nodes_train_as_in_one_process(tmp_path):
    inputs = make_inputs(tmp_path)
    local = train(overrides(inputs, tmp_path / "local", "trainer.worker_group=local"))
    somebody_elses = placement_group([{"CPU": 1}])  # else both pools would fit on one node
    assert somebody_elses.wait(300)
    split = train(
        overrides(
            inputs,
            tmp_path / "split",
            "trainer.resource_pools={main: [1], values: [1]}",
            "trainer.placement={Critic: values}",
            "trainer.save_freq=1",
        )
    )
    nodes = {group._processes.facts[0]["node_id"] for group in split.groups.values()}
    assert len(nodes) == 2
    assert hashes(split) == hashes(local)
    assert metrics(tmp_path / "split") == metrics(tmp_path / "local")
    split.shutdown()
    remove_placement_group(somebody_elses)
