"""Whole runs with the vLLM rollout: they agree with the trainer, resume exactly, and notice stale weights."""

from __future__ import annotations

import importlib.util

import pytest

from strop.errors import ModelError
from strop.tracking.jsonl import read_metrics

import tiny_model
from killing import ROWS, SETTINGS, copy_until, kill
from messages import naming
from outside import require_vllm
from runs import hashes, make_inputs, metrics, overrides, train

require_vllm()
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("no_vllm_outlives_its_module")]

VLLM = (
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.max_num_seqs=16",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.1",
    "actor_rollout_ref.rollout.verify_weights_every=3",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = make_inputs(tmp_path_factory.mktemp("inputs"), rows=ROWS)
    tiny_model.save(folder / "model", hidden=64)  # vLLM has no kernel for smaller heads
    return folder


@pytest.fixture(scope="module")
def undisturbed(inputs):
    run = inputs / "undisturbed"
    return run, hashes(train(overrides(inputs, run, *VLLM, *SETTINGS)))


def test_sampler_and_trainer_agree_after_every_update(undisturbed):
    run, _ = undisturbed
    lines = read_metrics(run / "metrics.jsonl")
    differences = [line["training/rollout_probs_diff_mean"] for line in lines if line["step"]]
    assert len(differences) == 4
    assert max(differences) < 1e-5
    # Transfers 0 and 3: the latter comes with the generation of iteration 4.
    assert [line["step"] for line in lines if "timing_s/verify_weights" in line] == [0, 4]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft: pip install 'strop[peft]'")
def test_lora_adapters_arrive_merged(inputs, tmp_path):
    lora = (
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.model.modules_to_save=[embed_tokens,norm]",
        "actor_rollout_ref.rollout.verify_weights_every=1",
    )
    train(overrides(inputs, tmp_path, *VLLM, *lora, "algorithm.adv_estimator=grpo"))
    lines = [line for line in read_metrics(tmp_path / "metrics.jsonl") if line["step"]]
    assert len(lines) == 2
    assert all("timing_s/verify_weights" in line for line in lines[1:])
    assert max(line["training/rollout_probs_diff_max"] for line in lines) < 1e-5


@pytest.mark.slow
def test_a_killed_run_continues_to_the_same_numbers(inputs, undisturbed, tmp_path):
    run, expected = undisturbed
    copy_until(run, 2, tmp_path / "run")
    options = overrides(inputs, tmp_path / "run", *VLLM, *SETTINGS)
    kill("update", 3, options)
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "2\n"
    assert hashes(train(options)) == expected
    assert metrics(tmp_path / "run") == metrics(run)


@pytest.mark.slow
def test_weights_that_do_not_arrive_end_the_run_by_name(inputs, tmp_path, monkeypatch):
    from strop.rollout.vllm.settings import InProcessWeightTransfer

    receive, calls = InProcessWeightTransfer.receive_weights, []

    def lose_later_ones(self, update):
        calls.append(update)
        kept = list(update.weights)
        receive(self, type(update)(kept if len(calls) == 1 else kept[:5]))

    monkeypatch.setattr(InProcessWeightTransfer, "receive_weights", lose_later_ones)
    every = "actor_rollout_ref.rollout.verify_weights_every=1"
    with pytest.raises(ModelError, match=naming("version 1", "26 parameters")):
        train(overrides(inputs, tmp_path, *VLLM, every, "trainer.val_before_train=false"))


@pytest.mark.slow
def test_it_generates_ahead_and_a_killed_run_continues_to_the_same_numbers(inputs, tmp_path):
    ahead = (
        "actor_rollout_ref.hybrid_engine=false",
        "actor_rollout_ref.actor.rollout_is=token",
        "trainer.worker_group=local",
        "trainer.resource_pools={learner: [1], rollout: [1]}",
        "trainer.placement={Rollout: rollout}",
        "trainer.async_steps=2",  # the first number at which an update may cut a sample
        "data.max_response_length=12",
    )
    options = [*VLLM, *SETTINGS, *ahead]
    expected = hashes(train(overrides(inputs, tmp_path / "whole", *options)))
    lines = metrics(tmp_path / "whole")
    assert max(line["async/staleness/max"] for line in lines[1:]) == 2
    killed = overrides(inputs, tmp_path / "killed", *options)
    kill("in_flight", 3, killed)
    assert hashes(train(killed)) == expected
    assert metrics(tmp_path / "killed") == lines


REPLIES = """
import os, random, time

class Replies:
    def reset(self, seed):
        self.seed = seed

    def respond(self, response, turn):
        time.sleep(random.SystemRandom().random() * float(os.environ["DELAY"]))
        return None if turn == 2 else str(self.seed % 100)
"""


@pytest.mark.slow
def test_turns_are_sampled_as_they_are_trained_whenever_answers_come(inputs, monkeypatch):
    (inputs / "replies.py").write_text(REPLIES)
    options = (
        *VLLM,
        f"environment.path={inputs / 'replies.py'}:Replies",
        "data.max_response_length=16",
        "actor_rollout_ref.rollout.stop_token_ids=[4,5,6,7,8,9]",  # a random policy seldom says <end>
        "algorithm.adv_estimator=grpo",
    )
    found = []
    for delay in ("0", "0.1"):
        monkeypatch.setenv("DELAY", delay)
        found.append(hashes(train(overrides(inputs, inputs / f"turns{delay}", *options))))
    assert found[0] == found[1]
    lines = [line for line in read_metrics(inputs / "turns0" / "metrics.jsonl") if line["step"]]
    assert max(line["training/rollout_probs_diff_mean"] for line in lines) < 1e-5
    assert min(line["turns/mean"] for line in lines) > 1
