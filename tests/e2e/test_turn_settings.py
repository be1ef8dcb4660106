"""A task that needs its tool is learned in every setting, with the same weights for any delay of the tool."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from strop.tracking.jsonl import read_metrics

import agent_demo
import lookup_task
import tool_demo
from outside import require_vllm
from runs import TIMES, hashes, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

RANKS = ("trainer.n_gpus_per_node=2", "trainer.worker_group=ray")
LORA = (
    "actor_rollout_ref.model.lora_rank=16",
    "actor_rollout_ref.model.modules_to_save=[embed_tokens,norm]",
    "actor_rollout_ref.actor.optim.lr=2e-3",
)
FILTER = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.max_num_gen_batches=20")
# Of the other estimators test_turn_runs.py compares the weights.
SETTINGS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "dynamic sampling": FILTER,
    "lora": LORA,
    # samples are up to four updates old: at twice the rate the policy falls after it has learned
    "async 4": (*lookup_task.AHEAD, "trainer.async_steps=4", "actor_rollout_ref.actor.optim.lr=5e-4"),
    "two sharded ranks": RANKS,
    "vllm": ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.gpu_memory_utilization=0.1"),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return lookup_task.make(tmp_path_factory.mktemp("inputs"))


@pytest.mark.parametrize("demo", [tool_demo, agent_demo])
def test_the_demo_learns_to_use_its_tool(tmp_path, monkeypatch, capsys, demo):
    monkeypatch.chdir(tmp_path)  # evaluations have folders of their own here
    monkeypatch.setattr("sys.argv", ["demo.py", "--out", str(tmp_path), "--steps", "30"])
    demo.main()
    *_, line = capsys.readouterr().out.splitlines()
    before, after, off = map(float, re.findall(r"0\.\d+|1\.00", line))
    assert (before < 0.25, after > 0.9, off < 0.05) == (True, True, True), line


@pytest.mark.parametrize("name", SETTINGS)
def test_the_task_is_learned_with_the_same_weights_for_any_delay(inputs, tmp_path, name, request):
    if name == "vllm":
        require_vllm()
    if "ranks" in name:
        request.getfixturevalue("ray_session")
    found, scores = [], []
    for delay in (0.0, 0.2):
        lookup_task.delay(inputs, delay)
        run = tmp_path / str(delay)
        trainer = train(lookup_task.options(inputs, run, *SETTINGS[name]))
        lines = [line for line in read_metrics(run / "metrics.jsonl") if line["step"]]
        scores.append([line["critic/score/mean"] for line in lines])
        kept = [
            {k: v for k, v in line.items() if not k.startswith((*TIMES, "environment/"))} for line in lines
        ]
        found.append((hashes(trainer), kept))
        trainer.shutdown()
    print(name, *(f"{score:.2f}" for score in scores[0]), found[0][0])  # with -s
    assert found[0] == found[1]
    assert scores[0][0] < 0.4  # dynamic sampling leaves out groups that fail as a whole
    assert sum(scores[0][-3:]) / 3 > 0.6
