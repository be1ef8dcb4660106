"""The key ``use_remove_padding`` through workers: on ranks that shard the model, and in whole runs."""

from __future__ import annotations

import packing_jobs as jobs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strop.config.load import load_config
from strop.controller.pools import Role
from strop.engines.micro_batches import MicroBatching
from strop.models.loader import load_scorer
from strop.workers.reward_model import RewardModelWorker

import tiny_model
from builders import random_samples
from ranks import Ranks
from runs import make_inputs, overrides, train

PACKED = "actor_rollout_ref.model.use_remove_padding=true"  # the critic's follows it
CHECKPOINTING = (
    "actor_rollout_ref.model.enable_gradient_checkpointing=true",
    "critic.model.enable_gradient_checkpointing=true",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model.save(tmp_path_factory.mktemp("tiny"), hidden=32)


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2) as processes:
        yield processes


@pytest.mark.parametrize("role", [Role.Actor, Role.Critic])
@pytest.mark.parametrize("checkpointing", [(), CHECKPOINTING], ids=["", "checkpointing"])
@pytest.mark.parametrize(
    ("rows", "micro"),
    [(16, MicroBatching(rows=8)), (15, MicroBatching(rows=1)), (16, MicroBatching(max_tokens=15))],
    ids=["even", "with a row that fills up", "with empty micro-batches"],
)
def test_gradients_of_two_ranks_are_those_of_one_padded_process(
    folder, ranks, role, checkpointing, rows, micro
):
    [expected] = ranks.run(1, jobs.gradient, folder, role, rows, MicroBatching(rows=8))
    for found in ranks.run(2, jobs.gradient, folder, role, rows, micro, PACKED, *checkpointing):
        assert list(found) == list(expected)
        ours, theirs = (
            torch.cat([w.double().flatten() for w in side.values()]) for side in (found, expected)
        )
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm()


@given(rows=st.integers(1, 40), cap=st.integers(11, 60), seed=st.integers(0, 99))
def test_a_packed_micro_batch_is_filled_with_real_tokens_and_never_above_the_cap(rows, cap, seed):
    samples, micro = random_samples(rows, seed=seed), MicroBatching(max_tokens=cap)
    lengths = samples.batch["attention_mask"].sum(dim=1)
    pieces = micro.split(samples, packed=True)
    tokens = [int(lengths[piece].sum()) for piece in pieces]
    assert sorted(torch.cat(pieces).tolist()) == list(range(rows))
    assert max(tokens) <= cap
    assert all(
        a + int(lengths[b[0]]) > cap for a, b in zip(tokens, pieces[1:], strict=False)
    )  # none is spare
    assert len(pieces) <= len(micro.split(samples))


def test_a_reward_model_follows_the_policys_key(folder, tmp_path):
    load_scorer(folder, fresh_head_seed=3).save_pretrained(tmp_path)
    tiny_model.build_tokenizer().save_pretrained(tmp_path)
    samples = random_samples(8)
    scores = []
    for extra in ([], [PACKED]):
        config = load_config(
            [
                f"actor_rollout_ref.model.path={folder}",
                f"reward_model.model.path={tmp_path}",
                "reward_model.model.input_tokenizer=null",
                "reward_model.micro_batch_size_per_gpu=3",
                "data.train_files=unused",
                "data.val_files=unused",
                "trainer.device=cpu",
                *extra,
            ]
        )
        worker = RewardModelWorker(config, Role.RewardModel)
        worker.init_model()
        assert worker.engine.module.packed == bool(extra)
        scores.append(worker.compute_rm_score(samples).batch["rm_scores"])
    torch.testing.assert_close(scores[1], scores[0], atol=1e-6, rtol=1e-5)


def test_a_run_ends_at_the_weights_of_a_padded_run(tmp_path):
    """The actor trains packed and generates padded, with one model; reference and critic follow the key."""
    inputs = make_inputs(tmp_path)
    keys = (
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "critic.optim.lr=1e-3",
        "algorithm.kl_ctrl.kl_coef=0.05",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=30",
        "critic.ppo_max_token_len_per_gpu=26",
        "trainer.test_freq=-1",
    )
    weights = []
    for name, extra in (("padded", []), ("packed", [PACKED, *CHECKPOINTING])):
        trainer = train(overrides(inputs, tmp_path / name, *keys, *extra))
        roles = [group.worker.engine.module for group in (trainer.actor, trainer.critic)]
        assert [role.packed for role in roles] == [bool(extra)] * 2
        weights.append(torch.cat([w.detach().flatten() for role in roles for w in role.parameters()]))
    assert (weights[1] - weights[0]).norm() <= 1e-5 * weights[0].norm()
