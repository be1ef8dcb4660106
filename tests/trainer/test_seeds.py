from __future__ import annotations

import torch

from strop.trainer.seeds import permutation, sample_seeds


def test_seeds_depend_on_seed_stream_and_iteration_and_on_nothing_else():
    torch.manual_seed(1)
    first = sample_seeds(1, "rollout", 5, 8, 4)
    torch.manual_seed(2)
    assert torch.equal(first, sample_seeds(1, "rollout", 5, 8, 4))
    for other in (
        sample_seeds(2, "rollout", 5, 8, 4),
        sample_seeds(1, "validation", 5, 8, 4),
        sample_seeds(1, "rollout", 6, 8, 4),
    ):
        assert not set(first.flatten().tolist()) & set(other.flatten().tolist())


def test_every_sample_has_a_seed_of_its_own_that_a_generator_accepts():
    seeds = sample_seeds(1, "rollout", 1, 500, 8)
    assert seeds.shape == (500, 8)
    assert len(set(seeds.flatten().tolist())) == 4000
    assert int(seeds.min()) >= 0
    torch.Generator().manual_seed(int(seeds.max()))


def test_permutations_hold_every_row_once_and_differ_by_epoch():
    orders = [permutation(1, "actor", 50, 3, epoch).tolist() for epoch in range(3)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
