"""The vLLM rollout beside FSDP2 shards, on ranks that share an engine, and in a pool of its own."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tiny_model
from outside import require_vllm
from runs import make_inputs, metrics, overrides, train

require_vllm()

COMMON = (
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.max_num_seqs=16",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.1",
    "actor_rollout_ref.rollout.verify_weights_every=1",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "critic.optim.lr=1e-3",
    "trainer.total_training_steps=3",
    "trainer.save_freq=3",
)
LAYOUTS = {
    "1 rank": ("trainer.worker_group=ray",),
    "2 ranks, an engine each": ("trainer.n_gpus_per_node=2",),
    "2 ranks, one engine": (
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    ),
    "actor on 2 ranks, rollout on 1 other": (
        "actor_rollout_ref.hybrid_engine=false",
        "trainer.resource_pools={policy: [2], rollout: [1]}",
        "trainer.placement={Actor: policy, Critic: policy, RefPolicy: policy, Rollout: rollout}",
    ),
}


def actor_of(run: Path) -> torch.Tensor:
    weights = load_file(run / "global_step_3" / "actor" / "huggingface" / "model.safetensors")
    return torch.cat([weight.double().flatten() for _, weight in sorted(weights.items())])


@pytest.fixture(scope="module")
def results(tmp_path_factory, ray_session):
    inputs = make_inputs(tmp_path_factory.mktemp("inputs"))
    tiny_model.save(inputs / "model", hidden=64)
    found = {}

    def run(layout: str) -> Path:
        if layout not in found:
            found[layout] = inputs / layout.replace(" ", "_").replace(",", "")
            train(overrides(inputs, found[layout], *COMMON, *LAYOUTS[layout])).shutdown()
        return found[layout]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "1 rank"])
def test_every_layout_trains_the_same_policy(results, layout):
    before = shared()
    expected, found = actor_of(results("1 rank")), actor_of(results(layout))
    assert (found - expected).norm() / expected.norm() < 1e-5
    differences = [
        line["training/rollout_probs_diff_mean"] for line in metrics(results(layout)) if line["step"]
    ]
    assert len(differences) == 3
    assert max(differences) < 1e-5
    # what vLLM's processes share on a CPU; other tests start engines meanwhile
    left, deadline = shared() - before, time.monotonic() + 120
    while left := left & shared():
        assert time.monotonic() < deadline, left
        time.sleep(0.5)


def shared() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("*cpushm*")}
