"""Runs on Ray whose rollout has a pool of its own: the way of the weights changes no number."""

from __future__ import annotations

import pytest

from runs import hashes, make_inputs, metrics, overrides, train

APART = (
    "actor_rollout_ref.hybrid_engine=false",
    "trainer.resource_pools={learner: [2], rollout: [1]}",
    "trainer.placement={Rollout: rollout}",
    "trainer.total_training_steps=3",
    "trainer.save_freq=-1",
)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 2])
def test_a_broadcast_gives_the_run_that_the_object_store_gives(ray_session, tmp_path, steps):
    inputs, found = make_inputs(tmp_path / "inputs"), {}
    for way in ("object_store", "broadcast"):
        run = tmp_path / way
        more = (f"trainer.async_steps={steps}", f"actor_rollout_ref.rollout.weight_transfer={way}")
        trainer = train(overrides(inputs, run, *APART, *more))
        try:
            assert (trainer.weights._broadcasts, trainer.weights.version) == (way == "broadcast", 3)
            sent = trainer.groups["rollout"].traffic.sent
            found[way] = hashes(trainer), metrics(run)
        finally:
            trainer.shutdown()
        print(way, sent)
    assert found["broadcast"] == found["object_store"]
