"""The task of ``examples/tool_demo.py`` as options of a run: a tool that a model needs, late at random."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import tool_demo

LATE = """
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
"""Generation ahead of the learner, on threads of one process; with ``trainer.async_steps``."""


def make(folder: Path, *, steps: int = 420, rows: int = 40_000) -> Path:
    """Write a model, rows, the tool and its delay (none) for ``options``; return ``folder``."""
    torch.manual_seed(1)
    tool_demo.warm_up(folder / "model", steps=steps, seed=1)
    (folder / "late.py").write_text(LATE)
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, tool_demo.rows(rows, seed=1))))
    delay(folder, 0.0)
    return folder


def delay(inputs: Path, seconds: float) -> None:
    """Let each call of the tool take up to ``seconds``.

    In a file, since the processes of Ray do not see this one's environment.
    """
    (inputs / "delay").write_text(str(seconds))


def options(inputs: Path, run: Path, *extra: str) -> list[str]:
    """Return the options of a run of GRPO: 24 iterations of 64 prompts x 4 samples."""
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
