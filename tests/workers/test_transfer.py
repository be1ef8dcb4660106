"""Weights by broadcast between pools: gloo ranks stand in for GPUs."""

from __future__ import annotations

import pytest
import torch
import transfer_jobs as jobs

import tiny_model
from messages import Message
from ranks import Ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model.save(tmp_path_factory.mktemp("tiny"), hidden=32)


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4) as processes:
        yield processes


@pytest.mark.fast("4-2-bfloat16")
@pytest.mark.parametrize(
    ("world", "actors", "dtype"),
    [(2, 1, "float32"), (3, 2, "bfloat16"), (4, 2, "bfloat16"), (4, 2, "float32")],
)
def test_rollouts_hold_the_weights_of_sharded_actors_bit_for_bit(
    folder, ranks, tmp_path, world, actors, dtype
):
    found = ranks.run(world, jobs.pools, folder, tmp_path, actors, dtype)
    trained, expected = found[0]
    for held, sums in found[actors:]:
        assert held.keys() == trained.keys()
        for name, weight in trained.items():
            assert held[name].dtype == getattr(torch, dtype)
            assert torch.equal(held[name], weight.to(held[name].dtype)), name
        assert sums == expected


def test_buckets_of_any_size_arrive_in_order(ranks):
    [_, *received] = ranks.run(3, jobs.buckets)
    for found in received:
        for transfer, arrived in enumerate(found):
            sent = jobs.weights(transfer)
            assert [name for name, _ in arrived] == [name for name, _ in sent]
            assert all(
                torch.equal(mine, theirs) for (_, mine), (_, theirs) in zip(arrived, sent, strict=True)
            )


def test_weights_that_do_not_fit_leave_no_rank_waiting(folder, ranks):
    sent, *errors = ranks.run(3, jobs.give_up, folder)
    assert sent == "sent"
    assert all("weight 0 is no parameter" in error for error in errors)


@pytest.mark.parametrize("buckets", [1, 3])
def test_a_rank_without_memory_for_a_bucket_leaves_no_sender_waiting(ranks, buckets):
    sent, received = ranks.run(2, jobs.run_out_of_memory, buckets)
    assert received == "no room"
    assert sent == Message("weight transfer", "OutOfMemoryError: no room")
