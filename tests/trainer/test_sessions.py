"""A run whose samples are sessions with branches."""

from __future__ import annotations

import functools

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from strop.algorithms.token_tree import plain
from strop.protocol import DataProto
from strop.workers.policy import ActorRolloutRefWorker

from runs import make_inputs, overrides, train


def test_a_run_learns_from_the_branches_of_sessions(tmp_path, monkeypatch):
    generate = ActorRolloutRefWorker.generate_sequences

    @functools.wraps(generate)  # keeps the mark for groups
    def branching(worker, prompts, **options):
        result = generate(worker, prompts, **options)
        follows = plain(*result.batch["response_mask"].shape)
        follows[::2, 2] = -1  # a second call with the prompt's context
        return result.union(DataProto({"follows": follows}))

    monkeypatch.setattr(ActorRolloutRefWorker, "generate_sequences", branching)
    inputs = make_inputs(tmp_path)
    options = ("actor_rollout_ref.actor.ppo_epochs=2", "algorithm.kl_ctrl.kl_coef=0.1")
    train(overrides(inputs, tmp_path / "run", *options, "trainer.total_training_steps=1"))
    model = AutoModelForCausalLM.from_pretrained(inputs / "model")
    [path] = (tmp_path / "run" / "rollouts").glob("*.parquet")
    branched = 0
    for row in pq.read_table(path).to_pylist():
        prompt, response, follows = row["prompt_ids"], row["response_ids"], row["follows"]
        assert len(row["values"]) == len(row["advantages"]) == len(follows) == len(response)
        if len(response) > 2 and follows[2] == -1:
            branched += 1
            with torch.no_grad():
                logits = model(torch.tensor([prompt + response[2:]])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1)[range(len(response) - 2), response[2:]].tolist()
            for name in ("old_log_probs", "ref_log_prob"):
                assert row[name][2:] == pytest.approx(expected, abs=1e-4)
    assert branched > 3
