"""Whole PPO runs with strategy=megatron on gloo ranks, against one process of strategy=fsdp."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import tiny_model
from outside import require_vllm
from runs import make_inputs, metrics, overrides, train

if find_spec("megatron") is None:  # found, not imported: its import takes 2 s of every worker
    pytest.skip("needs megatron-core: pip install 'strop[megatron]'", allow_module_level=True)
pytestmark = pytest.mark.slow

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
families = importlib.import_module("families")

ACTOR = "actor_rollout_ref.actor"
STEPS = 5
COMMON = (
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    f"trainer.total_training_steps={STEPS}",
    f"trainer.save_freq={STEPS}",
    f"{ACTOR}.optim.lr=1e-3",
    f"{ACTOR}.optim.eps=1e-5",
    "critic.optim.lr=1e-3",
    "critic.optim.eps=1e-5",
    "algorithm.kl_ctrl.kl_coef=0.1",  # a reference model
    "teacher.kl=sampled",
)
MEGATRON = (
    f"{ACTOR}.strategy=megatron",
    "actor_rollout_ref.model.external_lib=engines.megatron_shim",
    f"{ACTOR}.megatron.tensor_model_parallel_size=2",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=3",
    "critic.ppo_micro_batch_size_per_gpu=1",
)
LAYOUTS = {
    "fsdp": (),
    "tp2": (*MEGATRON, "trainer.n_gpus_per_node=2"),
    "tp2 pp2": (*MEGATRON, "trainer.n_gpus_per_node=4", f"{ACTOR}.megatron.pipeline_model_parallel_size=2"),
    "tp2 dp2": (*MEGATRON, "trainer.n_gpus_per_node=4"),
    "tp2 ep2": (*MEGATRON, "trainer.n_gpus_per_node=2", f"{ACTOR}.megatron.expert_model_parallel_size=2"),
}
ROLLOUTS = {
    "hf": (),
    "vllm": (
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.max_num_seqs=16",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.1",
        "actor_rollout_ref.rollout.verify_weights_every=1",
    ),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory, ray_session):
    inputs = make_inputs(tmp_path_factory.mktemp("inputs"))
    tiny_model.save(inputs / "model", hidden=64)  # vLLM's attention on a CPU takes no smaller heads
    tiny_model.save(inputs / "experts", hidden=32)
    families.model(
        "Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, router_aux_loss_coef=0.1
    ).save_pretrained(inputs / "experts")
    found: dict[tuple[str, ...], Path] = {}

    def run(layout: str, rollout: str, model: str = "model") -> Path:
        key = (layout, rollout, model)
        if key not in found:
            folder = found[key] = inputs / " ".join(key).replace(" ", "_")
            paths = (f"actor_rollout_ref.model.path={inputs / model}", f"teacher.model.path={inputs / model}")
            options = overrides(inputs, folder, *COMMON, *ROLLOUTS[rollout], *LAYOUTS[layout], *paths)
            train(options).shutdown()
        return found[key]

    return run


def weights_of(run: Path, role: str) -> dict[str, torch.Tensor]:
    """Weights as transformers reads them: files of several ranks have fused experts, others single ones."""
    folder = run / f"global_step_{STEPS}" / role / "huggingface"
    auto = AutoModelForCausalLM if role == "actor" else AutoModelForSequenceClassification
    return {name: weight.detach() for name, weight in auto.from_pretrained(folder).named_parameters()}


@pytest.mark.parametrize(
    ("layout", "rollout", "model"),
    [
        ("tp2 pp2", "hf", "model"),
        ("tp2 dp2", "hf", "model"),
        ("tp2 pp2", "vllm", "model"),
        ("tp2 ep2", "hf", "experts"),
    ],
)
def test_runs_have_the_parameters_and_metrics_of_one_process_of_fsdp(results, layout, rollout, model):
    if rollout == "vllm":
        require_vllm()
    run, reference = results(layout, rollout, model), results("fsdp", rollout, model)
    for role in ("actor", "critic"):
        found, expected = weights_of(run, role), weights_of(reference, role)
        assert found.keys() == expected.keys()
        largest = float(torch.stack([(found[name] - expected[name]).abs().max() for name in expected]).max())
        print(f"{role} ({model}) on {layout} with {rollout}: {largest:.1e}")
        assert largest < 1e-5
    ours, theirs = metrics(run), metrics(reference)
    assert len(ours) == len(theirs) == STEPS
    assert ("actor/router_load_max" in ours[0]) == (model == "experts")
    for line, other in zip(ours, theirs, strict=True):
        assert line == pytest.approx(other, rel=1e-4, abs=1e-4)
