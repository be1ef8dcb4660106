"""Errors of workers that die, raise or hang; nothing of the run is left then."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
import torch

from strop.errors import WorkerError
from strop.protocol import DataProto

from messages import mentions, naming
from toys import BrokenWorker, SlowToLoad, limit, pools, ray_group

pytestmark = pytest.mark.usefixtures("ray_session")
HERE = os.uname().nodename


def _failure(call, *args) -> str:
    with pytest.raises(WorkerError) as caught:
        call(*args)
    return str(caught.value)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _require_gone(pids: list[int]) -> None:
    _wait_for(lambda: not any(map(_alive, pids)))


@pytest.fixture
def pair():
    """Two ranks, and a third one in a pool of its own."""
    main, other = pools(main=[2], other=[1])
    actor, critic = ray_group(main, "Actor"), ray_group(other, "Critic")
    pids = actor.pids() + critic.pids()
    yield actor, critic, pids
    _require_gone(pids)


def test_a_worker_that_is_killed_in_a_call_is_named_with_its_last_lines(pair):
    actor, _, pids = pair
    actor.say("so far so good")
    message = _failure(actor.die, 1)
    assert mentions(message, "Actor", "rank 1", HERE, pids[1], "die")
    assert "so far so good\n" in message
    assert "about to end" in message
    assert "rank 1 warns" in message


def test_a_worker_that_is_killed_while_idle_is_named_although_another_pool_is_busy(pair):
    actor, _, pids = pair
    call = actor.sleep.start(0)
    os.kill(pids[2], signal.SIGKILL)
    message = _failure(call.get)
    assert mentions(message, "Critic", "rank 0", HERE, pids[2])
    assert "printed nothing" in message


@pytest.mark.slow
def test_a_worker_that_died_between_two_calls_is_named_by_the_next(pair):
    actor, _, pids = pair
    os.kill(pids[0], signal.SIGKILL)
    assert f"Actor rank 0 on {HERE} (pid {pids[0]}) died" in _failure(actor.add, 1)


def test_the_exception_is_reported_and_not_the_lost_connection_of_its_peers(pair):
    actor, _, pids = pair
    message = _failure(actor.fail, 0)
    assert mentions(message, "Actor", "rank 0", HERE, pids[0], "fail")
    assert "ZeroDivisionError: no such number" in message
    assert 'raise ZeroDivisionError("no such number")' in message
    assert "ray::" not in message


def test_after_a_failure_every_call_to_any_group_raises_it_again(pair, tmp_path):
    actor, critic, _ = pair
    message = _failure(actor.die, 0)
    for group in (actor, critic):
        assert _failure(group.add, 1) == message
        assert _failure(group.nodes_without, tmp_path) == message
        group.shutdown()
        group.shutdown()


def test_a_group_that_was_shut_down_is_named():
    group = ray_group(pools(main=[1])[0], "Critic")
    group.shutdown()
    assert mentions(_failure(group.add, 1), "'main'")


@pytest.mark.fast("sleep")
@pytest.mark.parametrize("fault", ["sleep", "hold_the_interpreter"])
def test_a_rank_that_hangs_is_named_with_the_stacks_of_all(monkeypatch, fault):
    # that of a rank without its interpreter does not come
    monkeypatch.setattr("strop.controller.ray.processes._STACKS_S", 60.0 if fault == "sleep" else 5.0)
    group = ray_group(pools(main=[2])[0], "Critic")
    pids = group.pids()
    call = getattr(group, fault).start(1)
    peer, other = group._processes.hosts
    _wait_for(lambda: "in _wait_for_all" in str(ray.get(peer.stack.remote())))
    if fault == "sleep":
        _wait_for(lambda: "in sleep" in str(ray.get(other.stack.remote())))
    limit(group, 4.0)
    message = _failure(call.get)
    assert mentions(message, "Critic", "rank 1", HERE, pids[1], fault)
    assert mentions(message, "4 s", "trainer.phase_timeout_s", "[0, 1]")
    own, peer = message.split("--- rank 1 on")[1].split("--- rank 0 on")
    assert "toys.py" in own.splitlines()[-1] or "toys.py" in own.splitlines()[-2]
    assert f"in {fault}" in own
    assert "in _wait_for_all" in peer
    assert "ray/host.py" not in message
    _require_gone(pids)


@pytest.mark.slow
def test_the_stacks_of_a_hang_are_those_of_all_pools():
    main, other = pools(main=[1], other=[1])
    actor, critic = ray_group(main, "Actor", phase_timeout_s=3.0), ray_group(other, "Critic")
    busy = critic.sleep.start(0)
    message = _failure(actor.sleep, 0)
    own, other = message.split("--- Critic rank 0 on ")
    assert own.count("in sleep") == 1
    assert "in sleep" in other
    assert _failure(busy.get) == message


def test_the_limit_that_is_reported_is_the_one_that_was_exceeded(monkeypatch):
    group = ray_group(pools(main=[1])[0], "Critic", worker_cls=SlowToLoad, phase_timeout_s=1.0)
    monkeypatch.setattr("strop.controller.ray.processes.START_S", 2.0)
    assert mentions(_failure(group.init_model), "init_model", "2 s", "trainer.phase_timeout_s")


@pytest.mark.fast("True")
@pytest.mark.parametrize("in_a_call", [False, True])
def test_a_worker_that_dies_with_its_results_is_named_by_their_reader(in_a_call):
    group = ray_group(pools(main=[2])[0], "Critic")
    pids = group.pids()
    rows = torch.ones(512, 512, dtype=torch.long)  # large enough to be objects of their own
    results = [group.double(DataProto({"input_ids": rows, "response_mask": rows})) for _ in range(20)]
    if in_a_call:
        group.die.start(1)
    else:
        os.kill(pids[1], signal.SIGKILL)
    _require_gone([pids[1]])

    def read() -> None:
        for result in results:  # until the store notices the death, they can be read
            result.batch["doubled"].sum()
            time.sleep(0.5)

    message = _failure(read)
    assert mentions(message, "Critic", "rank 1", HERE, pids[1])
    assert ("died in die; its last output:" in message) == in_a_call
    _require_gone(pids)
    assert _failure(group.add, 1) == message


@pytest.mark.parametrize(
    ("fault", "found", "is_final"),
    [
        ("our error", "ModelError: the folder has no weights", True),
        ("missing package", "MissingExtraError: this needs the package 'wonder'", True),
        ("more arguments", "RuntimeError: FussyError: too long", False),
        ("lock", "RuntimeError: ValueError: ('held by', ", False),
    ],
)
def test_an_exception_arrives_by_name_even_if_it_cannot_be_pickled(fault, found, is_final):
    group = ray_group(pools(main=[1])[0], "Critic")
    with pytest.raises(WorkerError, match=naming(found)) as caught:
        group.fail(0, fault)
    assert caught.value.is_final is is_final
    assert "died" not in str(caught.value)
    assert ("    raise " in str(caught.value)) is not is_final  # the place of an error that is not strop's


def test_a_restart_may_find_the_servers_that_a_worker_lacks():
    group = ray_group(pools(main=[1])[0], "Rollout")
    with pytest.raises(WorkerError, match=naming("LostServersError: 1 is needed")) as caught:
        group.fail(0, "lost servers")
    assert not caught.value.is_final


@pytest.mark.parametrize("fails", [False, True])
def test_the_children_of_a_worker_end_with_it(fails):
    group = ray_group(pools(main=[1])[0], "Critic")
    pids = group.start_child()
    assert all(map(_alive, pids))
    if fails:
        _failure(group.die, 0)
    else:
        group.shutdown()
    _require_gone(pids)


def test_a_worker_that_cannot_be_built_is_named():
    with pytest.raises(
        WorkerError, match=naming("Critic rank 0", "__init__", "ModelError: this worker cannot")
    ):
        ray_group(pools(main=[1])[0], "Critic", worker_cls=BrokenWorker)
