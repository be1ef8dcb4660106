from __future__ import annotations

import hypothesis.strategies as st
import pytest
import token_trees
import torch
from hypothesis import given, settings

from strop.algorithms.token_tree import PROMPT, Call
from strop.controller.shards import shard
from strop.protocol import DataProto

from builders import random_samples
from messages import naming


def _numbered(lengths: list[int]) -> DataProto:
    """A row for each length; ``row`` is its number."""
    mask_BT = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    tensors = {"attention_mask": mask_BT, "response_mask": mask_BT.float(), "row": torch.arange(len(lengths))}
    return DataProto.from_dict(tensors, {"name": [f"row {row}" for row in range(len(lengths))]}, {"n": 7})


@settings(max_examples=200)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    ranks=st.integers(1, 9),
    each=st.integers(1, 3),
)
def test_every_row_is_on_one_rank_and_comes_back_in_its_place(lengths, ranks, each):
    batch = _numbered(lengths)
    shards = shard(batch, ranks)
    assert len(shards.parts) == ranks
    assert {len(part) for part in shards.parts} == {-(-len(batch) // ranks)}
    assert sorted(torch.cat(shards.rows).tolist()) == list(range(len(batch)))
    for part, rows in zip(shards.parts, shards.rows, strict=True):
        assert part.batch["row"][: len(rows)].tolist() == sorted(rows.tolist())
        assert part.non_tensor_batch["name"][: len(rows)].tolist() == [f"row {row}" for row in rows.tolist()]
        assert not part.batch["response_mask"][len(rows) :].any()
        assert part.batch["attention_mask"].any(dim=1).all()  # a model can still read the padding
        assert part.meta_info == {"n": 7}
    assert sum(part.batch["response_mask"].sum() for part in shards.parts) == sum(lengths)
    joined = shards.join([part.repeat(each) for part in shards.parts])
    assert joined.batch["row"].tolist() == [row for row in range(len(batch)) for _ in range(each)]
    assert joined.non_tensor_batch["name"][0] == "row 0"
    assert torch.equal(joined.batch["response_mask"], batch.repeat(each).batch["response_mask"])


@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=64), ranks=st.integers(1, 8))
def test_no_rank_has_more_than_one_long_row_over_another_with_equal_counts(lengths, ranks):
    lengths = (lengths * ranks)[: len(lengths) // ranks * ranks] or [1] * ranks
    shards = shard(_numbered(lengths), ranks)
    tokens = [int(part.batch["attention_mask"].sum()) for part in shards.parts]
    assert sum(tokens) == sum(lengths)
    assert max(tokens) - min(tokens) <= max(lengths)


def test_one_rank_gets_the_batch_itself():
    batch = random_samples(5)
    shards = shard(batch, 1)
    assert shards.parts[0] is batch
    assert shards.join([batch]) is batch


def test_the_batch_is_left_as_it_was():
    batch = random_samples(5)
    before = batch.batch["response_mask"].clone()
    shard(batch, 4)
    assert torch.equal(batch.batch["response_mask"], before)


def test_without_an_attention_mask_the_rows_are_dealt_evenly():
    shards = shard(DataProto.from_dict({"seeds": torch.arange(7)}), 3)
    assert [len(rows) for rows in shards.rows] == [3, 2, 2]
    assert [len(part) for part in shards.parts] == [3, 3, 3]


def test_an_empty_batch_cannot_be_spread():
    with pytest.raises(ValueError, match="an empty batch"):
        shard(DataProto(), 2)


def test_ranks_must_return_as_many_rows_as_they_were_given():
    shards = shard(random_samples(4), 2)
    with pytest.raises(ValueError, match=naming("2 rows", "[2, 1]")):
        shards.join([shards.parts[0], shards.parts[1][:1]])
    with pytest.raises(ValueError, match=naming("2 rows", "[3, 3]")):
        shards.join([random_samples(3), random_samples(3)])


def test_ranks_get_like_numbers_of_tokens_of_leaves():
    tree = [Call(PROMPT, [], [7] * 9), *(Call(0, [4], [8]) for _ in range(6))]  # 21 tokens, 66 in its leaves
    plain = [[Call(PROMPT, [], [9] * length)] for length in (60, 50, 5)]
    batch = DataProto(token_trees.batch_of([*plain, tree], prompts=1, width=64))
    assert sorted(sorted(rows.tolist()) for rows in shard(batch, 2).rows) == [[0, 1], [2, 3]]
