"""A task that needs its tool is learned in every setting, with the same weights for any delay of the tool."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from strop.tracking.jsonl import read_metrics

import tool_demo
from outside import require_vllm
from runs import TIMES, hashes, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

# The seconds of a delay come from a file: the processes of Ray do not see this one's environment.
SLOW = """
import random, time
from pathlib import Path
from tool_demo import Lookup, calls, right

class Late(Lookup):
    def look_up(self, word: str) -> str:
        \"\"\"Return the number behind a number.

        Args:
            word: The number.
        \"\"\"
        time.sleep(random.SystemRandom().random() * float(Path(__file__).with_name("delay").read_text()))
        return super().look_up(word)
"""
AHEAD = (
    "actor_rollout_ref.hybrid_engine=False",
    "trainer.resource_pools={learner: [1], rollout: [1]}",
    "trainer.placement={Rollout: rollout}",
    "trainer.worker_group=local",
    "actor_rollout_ref.actor.rollout_is=token",
)
RANKS = ("trainer.n_gpus_per_node=2", "trainer.worker_group=ray")
LORA = (
    "actor_rollout_ref.model.lora_rank=16",
    "actor_rollout_ref.model.modules_to_save=[embed_tokens,norm]",
    "actor_rollout_ref.actor.optim.lr=2e-3",
)
FILTER = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.max_num_gen_batches=20")
SETTINGS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "rloo": ("algorithm.adv_estimator=rloo",),
    "remax": ("algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.n=1", "data.train_batch_size=256"),
    "gae": ("algorithm.adv_estimator=gae", "critic.optim.lr=1e-3", "trainer.critic_warmup=2"),
    "turn_level": ("algorithm.adv_estimator=turn_level",),
    "dynamic sampling": FILTER,
    "lora": LORA,
    "async 1": (*AHEAD, "trainer.async_steps=1"),
    "async 4": (*AHEAD, "trainer.async_steps=4"),
    "two sharded ranks": RANKS,
    "two whole ranks": (*RANKS, "actor_rollout_ref.actor.fsdp_config.fsdp_size=1"),
    "vllm": ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.gpu_memory_utilization=0.1"),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    torch.manual_seed(1)
    tool_demo.warm_up(folder / "model", steps=420, seed=1)
    (folder / "late.py").write_text(SLOW)
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, tool_demo.rows(40_000, seed=1))))
    return folder


def _options(inputs: Path, run: Path, *extra: str) -> list[str]:
    return [
        f"actor_rollout_ref.model.path={inputs / 'model'}",
        f"data.train_files={inputs / 'rows.jsonl'}",
        f"data.cache_dir={inputs / 'cache'}",
        f"environment.path={inputs / 'late.py'}:Late",
        f"environment.parser={inputs / 'late.py'}:calls",
        "environment.max_turns=3",
        f"custom_reward_function.path={inputs / 'late.py'}",
        "custom_reward_function.name=right",
        "data.train_batch_size=64",
        "data.max_prompt_length=8",
        "data.max_response_length=20",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "algorithm.adv_estimator=grpo",
        "algorithm.kl_ctrl.kl_coef=0",
        "trainer.logger=[console]",
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
        "trainer.total_training_steps=24",
        f"trainer.default_local_dir={run}",
        *extra,
    ]


@pytest.mark.parametrize("name", SETTINGS)
def test_the_task_is_learned_with_the_same_weights_for_any_delay(inputs, tmp_path, name, request):
    if name == "vllm":
        require_vllm()
    if "ranks" in name:
        request.getfixturevalue("ray_session")
    found, scores = [], []
    for delay in ("0", "0.2"):
        (inputs / "delay").write_text(delay)
        trainer = train(_options(inputs, tmp_path / delay, *SETTINGS[name]))
        lines = [line for line in read_metrics(tmp_path / delay / "metrics.jsonl") if line["step"]]
        scores.append([line["critic/score/mean"] for line in lines])
        kept = [{k: v for k, v in line.items() if not k.startswith((*TIMES, "environment/"))} for line in lines]
        found.append((hashes(trainer), kept))
        trainer.shutdown()
    print(name, *(f"{score:.2f}" for score in scores[0]), found[0][0])  # with -s
    assert found[0] == found[1]
    assert scores[0][0] < 0.3
    assert sum(scores[0][-3:]) / 3 > 0.6
