"""What is said when a worker dies, raises or hangs, and what is left of the run then: nothing."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from strop.controller.ray.group import RayWorkerGroup
from strop.errors import WorkerError
from strop.protocol import DataProto

from messages import mentions, naming
from toys import BrokenWorker, SlowToLoad, ToyWorker, pools

pytestmark = pytest.mark.usefixtures("ray_session")
HERE = os.uname().nodename


def _group(pool, name="Critic", *, worker_cls=ToyWorker, phase_timeout_s=100.0):
    settings = SimpleNamespace(handles=True, device="cpu", phase_timeout_s=phase_timeout_s)
    return RayWorkerGroup(
        worker_cls=worker_cls, init_kwargs={}, resource_pool=pool, name=name, settings=settings
    )


def _failure(call, *args) -> str:
    with pytest.raises(WorkerError) as caught:
        call(*args)
    return str(caught.value)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _require_gone(pids: list[int]) -> None:
    deadline = time.time() + 30
    while left := [pid for pid in pids if _alive(pid)]:
        assert time.time() < deadline, f"alive: {left}"
        time.sleep(0.1)


@pytest.fixture
def pair():
    """Two ranks, and a third one in a pool of its own."""
    main, other = pools(main=[2], other=[1])
    actor, critic = _group(main, "Actor"), _group(other, "Critic")
    pids = actor.pids() + critic.pids()
    yield actor, critic, pids
    _require_gone(pids)
    again = _group(pools(main=[1])[0])  # in the same session
    assert again.add(1) == 1
    again.shutdown()


@pytest.fixture
def pair_that_waits():
    """One rank in each of two pools; a call that takes five seconds has hung."""
    main, other = pools(main=[1], other=[1])
    return _group(main, "Actor", phase_timeout_s=5.0), _group(other, "Critic", phase_timeout_s=50.0)


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


def test_a_worker_that_died_between_two_calls_is_named_by_the_next(pair):
    actor, _, pids = pair
    os.kill(pids[0], signal.SIGKILL)
    assert f"Actor rank 0 on {HERE} (pid {pids[0]}) died" in _failure(actor.add, 1)


def test_the_exception_is_told_and_not_that_its_peers_lost_a_connection(pair):
    actor, _, pids = pair
    message = _failure(actor.fail, 0)
    assert mentions(message, "Actor", "rank 0", HERE, pids[0], "fail")
    assert "ZeroDivisionError: no such number" in message
    assert 'raise ZeroDivisionError("no such number")' in message
    assert "ray::" not in message


def test_an_error_of_ours_is_told_by_name_and_would_come_again(pair):
    actor, _, _ = pair
    with pytest.raises(WorkerError, match=naming("ModelError: the folder has no weights")) as caught:
        actor.fail_by_name(1)
    assert caught.value.is_final
    assert "Traceback" not in str(caught.value)


def test_after_a_failure_every_call_to_any_group_tells_it_again(pair, tmp_path):
    actor, critic, _ = pair
    message = _failure(actor.die, 0)
    for group in (actor, critic):
        assert _failure(group.add, 1) == message
        assert _failure(group.nodes_without, tmp_path) == message
        group.shutdown()
        group.shutdown()


def test_a_group_that_was_shut_down_says_so():
    group = _group(pools(main=[1])[0])
    group.shutdown()
    assert mentions(_failure(group.add, 1), "'main'")


@pytest.mark.parametrize("fault", ["sleep", "hold_the_interpreter"])
def test_a_rank_that_hangs_is_named_with_the_stacks_of_all(fault):
    group = _group(pools(main=[2])[0], phase_timeout_s=6.0)
    pids = group.pids()
    started = time.monotonic()
    message = _failure(getattr(group, fault), 1)
    assert time.monotonic() - started < 60
    assert mentions(message, "Critic", "rank 1", HERE, pids[1], fault)
    assert mentions(message, "6 s", "trainer.phase_timeout_s", "[0, 1]")
    own, peer = message.split("--- rank 1 on")[1].split("--- rank 0 on")
    assert "toys.py" in own.splitlines()[-1] or "toys.py" in own.splitlines()[-2]
    assert f"in {fault}" in own
    assert "in _wait_for_all" in peer
    assert "ray/host.py" not in message
    _require_gone(pids)


def test_the_stacks_of_a_hang_are_those_of_all_pools(pair_that_waits):
    actor, critic = pair_that_waits
    busy = critic.sleep.start(0)
    message = _failure(actor.sleep, 0)
    own, other = message.split("--- Critic rank 0 on ")
    assert own.count("in sleep") == 1
    assert "in sleep" in other
    assert _failure(busy.get) == message


def test_the_limit_that_is_reported_is_the_one_that_was_exceeded(monkeypatch):
    group = _group(pools(main=[1])[0], worker_cls=SlowToLoad, phase_timeout_s=1.0)
    monkeypatch.setattr("strop.controller.ray.processes.START_S", 5.0)
    assert mentions(_failure(group.init_model), "init_model", "5 s", "trainer.phase_timeout_s")


def test_a_worker_that_dies_with_its_results_is_named_by_who_reads_them():
    group = _group(pools(main=[2])[0])
    pids = group.pids()
    rows = torch.ones(512, 512, dtype=torch.long)  # large enough to be objects of their own
    result = group.double(DataProto({"input_ids": rows, "response_mask": rows}))
    os.kill(pids[1], signal.SIGKILL)
    _require_gone([pids[1]])
    time.sleep(5.0)  # until the store knows, what it holds can be read
    message = _failure(result.batch["doubled"].sum)
    assert mentions(message, "Critic", "rank 1", HERE, pids[1])
    _require_gone(pids)
    assert _failure(group.add, 1) == message


def test_a_death_in_a_call_is_told_so_by_who_reads_another_result():
    group = _group(pools(main=[1])[0])
    rows = torch.ones(512, 512, dtype=torch.long)
    result = group.double(DataProto({"input_ids": rows, "response_mask": rows}))
    group.die.start(0)
    time.sleep(5.0)
    assert "Critic rank 0 on" in (message := _failure(result.batch["doubled"].sum))
    assert "died in die; its last output:" in message


@pytest.mark.parametrize(
    ("fault", "told", "is_final"),
    [
        ("miss_a_package", "MissingExtraError: this needs the package 'wonder'", True),
        ("fail_with_more_arguments", "RuntimeError: FussyError: too long", False),
        ("fail_with_a_lock", "RuntimeError: ValueError: ('held by', ", False),
    ],
)
def test_an_exception_that_cannot_travel_is_told_all_the_same(fault, told, is_final):
    group = _group(pools(main=[1])[0])
    with pytest.raises(WorkerError) as caught:
        getattr(group, fault)()
    message = str(caught.value)
    assert told in message
    assert "died" not in message
    assert caught.value.is_final is is_final
    assert is_final or f"in {fault}" in message  # where it was raised


def test_the_children_of_a_worker_end_with_it():
    group = _group(pools(main=[1])[0])
    pids = group.start_child()
    assert all(map(_alive, pids))
    _failure(group.die, 0)
    _require_gone(pids)


def test_the_children_of_a_worker_end_when_its_run_ends_well():
    group = _group(pools(main=[1])[0])
    pids = group.start_child()
    group.shutdown()
    _require_gone(pids)


def test_a_worker_that_cannot_be_built_is_told_by_name():
    with pytest.raises(
        WorkerError, match=naming("Critic rank 0", "__init__", "ModelError: this worker cannot")
    ):
        _group(pools(main=[1])[0], worker_cls=BrokenWorker)
