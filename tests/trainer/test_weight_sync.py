"""Transfer, verification and release of the rollout's weights."""

from __future__ import annotations

import itertools

import pytest

from strop.controller.group import Future, GroupMethod
from strop.trainer.metrics import PhaseTimer
from strop.trainer.weight_sync import WeightSync
from strop.workers.policy import ActorRolloutRefWorker

from runs import make_inputs, overrides, train

WATCHED = ("sync_rollout", "verify_rollout", "generate_sequences", "release_rollout", "update_actor")


class Group:
    """Notes the calls it gets; hands out two buckets."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple]] = []
        self._buckets = itertools.cycle(["first", "second", None])

    def weight_bucket(self, restart):
        return next(self._buckets)

    def address_for(self, other):
        return None

    def __getattr__(self, name):
        def start(*args):
            self.calls.append((name, args))
            return Future(lambda: None)

        return GroupMethod(start)


class Apart(Group):
    """Has processes of its own."""

    world_size = 3

    def address_for(self, other):
        return "10.0.0.1"

    def open_channel(self, address):
        return 5000


@pytest.mark.parametrize(("every", "verified"), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (0, [])])
def test_the_first_transfer_and_every_so_many_are_verified(every, verified):
    group = Group()
    weights = WeightSync(group, group, verify_every=every)
    for version in range(5):
        weights.version = version
        weights.to_rollout(PhaseTimer())
        weights.to_rollout(PhaseTimer())  # the rollout has this version already
    assert [args for name, args in group.calls if name == "sync_rollout"] == [(n,) for n in range(5)]
    assert [args[0] for name, args in group.calls if name == "verify_rollout"] == verified


def test_a_rollout_apart_gets_buckets_and_then_their_version():
    actor, rollout = Group(), Group()
    weights = WeightSync(actor, rollout, verify_every=0)
    weights.version = 1
    weights.to_rollout(PhaseTimer())
    weights.release()  # its memory is nobody else's
    assert rollout.calls == [
        ("load_weights", ("first",)),
        ("load_weights", ("second",)),
        ("load_weights", (None, 1)),
    ]


@pytest.mark.parametrize(("ahead", "makes_room"), [(False, True), (True, False)])
def test_a_rollout_beside_other_roles_makes_room_for_the_update_unless_it_generates(ahead, makes_room):
    actor, rollout = Group(), Group()
    weights = WeightSync(actor, rollout, verify_every=0, ahead=ahead, shares_pool=True)
    weights.to_rollout(PhaseTimer())
    rollout.calls.clear()
    weights.release()
    assert rollout.calls == [("release_rollout", ())] * makes_room
    weights.to_rollout(PhaseTimer())  # two buckets, and the version: also of the same weights
    assert len(rollout.calls) == 4 * makes_room
    assert "release_rollout" not in dict(actor.calls)


def test_a_channel_is_opened_once_and_every_transfer_is_received_while_it_is_sent():
    actor, rollout = Apart(), Apart()
    weights = WeightSync(actor, rollout, verify_every=0)
    for version in (1, 2):
        weights.version = version
        assert weights.to_rollout(PhaseTimer()) == []
    where = ("10.0.0.1", 5000, 4)
    joining = [("join_channel", where)]
    assert actor.calls == [*joining, ("send_weights", ()), ("send_weights", ())]
    assert rollout.calls == [*joining, ("receive_weights", (1,)), ("receive_weights", (2,))]


def test_a_rollout_that_generates_ahead_is_sent_weights_without_waiting():
    actor, rollout = Group(), Group()
    weights = WeightSync(actor, rollout, verify_every=1, ahead=True)
    assert len(weights.to_rollout(PhaseTimer())) == 4  # two buckets, the version, the comparison
    assert weights.to_rollout(PhaseTimer()) == []


@pytest.mark.parametrize("hybrid", [True, False])
def test_in_a_run_the_rollout_is_released_before_every_update(tmp_path, monkeypatch, hybrid):
    calls: list[str] = []

    def noting(name, plain):
        def noted(worker, *args, **kwargs):
            calls.append(name)
            return plain(worker, *args, **kwargs)

        noted._strop_dispatch = plain._strop_dispatch
        return noted

    for name in WATCHED:
        plain = getattr(ActorRolloutRefWorker, name)
        monkeypatch.setattr(ActorRolloutRefWorker, name, noting(name, plain))
    more = (
        "trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.val_before_train=false",
        f"actor_rollout_ref.hybrid_engine={hybrid}",
    )  # fmt: skip
    train(overrides(make_inputs(tmp_path), tmp_path / "run", *more))
    iteration = ["sync_rollout", "generate_sequences", "release_rollout", "update_actor", "update_actor"]
    first = [*iteration[:1], "verify_rollout", *iteration[1:]]
    if not hybrid:  # one pool has both, and the weights come in buckets
        first, iteration = first[1:], iteration[1:]
    assert calls == [*first, *iteration]
