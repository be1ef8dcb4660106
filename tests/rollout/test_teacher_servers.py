"""Servers as teachers of a run."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest

import runs
from fake_vllm import FakeVLLM


def test_servers_judge_by_the_log_prob_of_each_token(tmp_path):
    inputs, server = runs.make_inputs(tmp_path), FakeVLLM(vocabulary=19)
    keys = (
        *(f"teacher.servers=[{server.url}]", "teacher.kl=sampled", "trainer.total_training_steps=1"),
        *(
            "reward_model.reward_manager=none",
            "algorithm.adv_estimator=grpo",
            "trainer.val_before_train=False",
        ),
        *("trainer.test_freq=-1", "actor_rollout_ref.actor.ppo_mini_batch_size=8"),
    )
    runs.train(runs.overrides(inputs, tmp_path / "run", *keys)).shutdown()
    table = pq.read_table(tmp_path / "run" / "rollouts" / "step_000001.parquet").to_pylist()
    assert len(table) == 16
    for row in table:
        scores = server.scores([*row["prompt_ids"], *row["response_ids"]])[len(row["prompt_ids"]) :]
        told = [item[str(token)]["logprob"] for item, token in zip(scores, row["response_ids"], strict=True)]
        assert row["teacher_log_prob"] == pytest.approx(told, abs=1e-3)
