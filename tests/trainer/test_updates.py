"""Mini-batches of an iteration, cut by hand."""

from __future__ import annotations

import torch

from strop.protocol import DataProto
from strop.trainer.updates import mini_batches


def test_the_last_mini_batch_has_the_rest_and_its_own_denominators():
    mask = torch.ones(20, 3)
    mask[-1, 1:] = 0
    batch = DataProto({"response_mask": mask, "row": torch.arange(20)})
    cut = mini_batches(batch, size=8, epochs=2, shuffle_seed=None, iteration=1, total_iterations=5)
    parts = list(cut)
    assert [len(part) for part in parts] == [8, 8, 4] * 2
    assert [part.meta_info["n_seqs"] for part in parts[:3]] == [8, 8, 4]
    assert [part.meta_info["n_tokens"] for part in parts[:3]] == [24, 24, 10]
    assert torch.cat([part.batch["row"] for part in parts[:3]]).tolist() == list(range(20))


def test_every_row_is_in_one_mini_batch_of_a_shuffled_epoch():
    batch = DataProto({"response_mask": torch.ones(20, 1), "row": torch.arange(20)})
    cut = mini_batches(batch, size=8, epochs=1, shuffle_seed=(1, "actor"), iteration=2, total_iterations=5)
    rows = torch.cat([part.batch["row"] for part in cut]).tolist()
    assert sorted(rows) == list(range(20)) != rows


def test_a_mini_batch_whose_samples_are_all_lost_has_denominators():
    mask = torch.ones(4, 3)
    mask[:2] = 0
    batch = DataProto({"response_mask": mask})
    cut = mini_batches(batch, size=2, epochs=1, shuffle_seed=None, iteration=1, total_iterations=1)
    denominators = [(part.meta_info["n_tokens"], part.meta_info["n_seqs"]) for part in cut]
    assert denominators == [(1.0, 1.0), (6.0, 2.0)]
