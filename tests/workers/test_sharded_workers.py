"""Workers on several ranks: updates, generation, weights in buckets."""

from __future__ import annotations

import pytest
import torch
import worker_jobs as jobs
from sharded_jobs import failure
from transformers import AutoModelForCausalLM

from strop.controller.pools import Role

import tiny_model
from messages import mentions
from ranks import Ranks

ACTOR_KEYS = "actor_rollout_ref.actor.fsdp_config"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model.save(tmp_path_factory.mktemp("tiny"), hidden=32)


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2) as processes:
        yield processes


def together(parts):
    """The rows of all ranks in the order of the whole batch."""
    return {name: torch.stack([part[name] for part in parts], dim=1).flatten(0, 1) for name in parts[0]}


def require_equal_samples(found, expected):
    assert torch.equal(found["responses"], expected["responses"])
    torch.testing.assert_close(
        found["rollout_log_probs"], expected["rollout_log_probs"], atol=1e-5, rtol=1e-5
    )


@pytest.mark.fast("Role.Critic")
@pytest.mark.parametrize("role", [Role.Actor, Role.Critic])
def test_updates_are_those_of_one_process_with_other_micro_batches(folder, ranks, role):
    rows = (
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3",
        "critic.ppo_micro_batch_size_per_gpu=3",
        f"{ACTOR_KEYS}.fsdp_size=1",
        f"{ACTOR_KEYS}.wrap_policy.transformer_layer_cls_to_wrap=Qwen2DecoderLayer",
        "critic.model.fsdp_config.wrap_policy.min_num_params=4000",
    )
    [(expected_metrics, expected)] = ranks.run(1, jobs.update_and_hash, folder, role)
    for metrics, found in ranks.run(2, jobs.update_and_hash, folder, role, *rows):
        ours, theirs = (torch.cat([w.flatten() for w in side.values()]) for side in (found, expected))
        assert (ours - theirs).norm() / theirs.norm() < 1e-5
        assert metrics == pytest.approx(expected_metrics, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(("world_size", "cap"), [(1, 40), (2, 11), (2, 40)])
def test_an_on_policy_step_finds_the_log_probs_of_a_pass_before_it(folder, ranks, world_size, cap):
    """The ranks cut other numbers of micro-batches (a small cap), and one of them has a padded row."""
    keys = ("use_dynamic_bsz=true", f"ppo_max_token_len_per_gpu={cap}")
    extra = [f"actor_rollout_ref.actor.{key}" for key in keys]
    apart, found = (ranks.run(world_size, jobs.on_policy, folder, before, *extra) for before in (True, False))
    for ours, theirs in zip(found, apart, strict=True):
        assert ours[0].keys() == theirs[0].keys() == {"old_log_probs", "entropys"}
        assert all(torch.equal(ours[0][name], theirs[0][name]) for name in ours[0])
        assert ours[1] == theirs[1]
        assert all(torch.equal(ours[2][name], theirs[2][name]) for name in ours[2])


def test_two_ranks_generate_what_one_process_generates(folder, ranks):
    [expected] = ranks.run(1, jobs.generate, folder, Role.ActorRollout, "greedy")
    found = together(ranks.run(2, jobs.generate, folder, Role.ActorRollout, "greedy"))
    require_equal_samples(found, expected)


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_in_buckets_make_a_separate_rollout_generate_like_the_actors(folder, ranks, world_size):
    [(handed, digest), *others] = ranks.run(world_size, jobs.buckets, folder, 10_000)
    assert handed[-1] is None
    assert len(handed) > 4
    assert all(set(nothing) == {None} and other == digest for nothing, other in others)
    sizes = [[weight.nbytes for _, weight in bucket] for bucket in handed[:-1]]
    assert all(sum(bucket) <= 10_000 or len(bucket) == 1 for bucket in sizes)
    names = [name for bucket in handed[:-1] for name, _ in bucket]
    assert names == [name for name, _ in AutoModelForCausalLM.from_pretrained(folder).named_parameters()]
    expected = together(ranks.run(world_size, jobs.generate, folder, Role.ActorRollout, "train"))
    found = together(ranks.run(2, jobs.generate_with, folder, handed))
    require_equal_samples(found, expected)


def test_weights_that_do_not_fit_a_rollout_are_errors_by_name(folder, ranks):
    name = "model.norm.weight"
    fits = AutoModelForCausalLM.from_pretrained(folder)
    whole = [(key, weight.detach()) for key, weight in fits.named_parameters()]
    without = [pair for pair in whole if pair[0] != name]
    cases = {
        (): [whole[:3], whole[3:]],
        (name,): [without],
        ("model.norm.bias",): [[*without, ("model.norm.bias", torch.zeros(32))]],
        (name, "[31]", "[32]"): [[*without, (name, torch.zeros(31))]],
        ("model.embed_tokens.weight came twice",): [whole, whole[:1]],
        ("and 23 more",): [],
    }
    for parts, handed in cases.items():
        [message] = ranks.run(1, failure, jobs.loaded, folder, [*handed, None])
        assert mentions(message, "ModelError", *parts) if parts else not message


def test_a_flipped_bit_in_the_file_of_a_rank_is_named_by_all(folder, ranks, tmp_path):
    for message in ranks.run(2, jobs.load_flipped, folder, tmp_path):
        assert mentions(message, "CheckpointError", "__1_0.distcp")
