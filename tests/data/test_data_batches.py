from __future__ import annotations

from functools import partial
from itertools import islice

import pytest
import torch

from strop.data.loader import EpochSampler, PromptLoader, collate, one_pass
from strop.errors import DataError

from messages import naming


def row(*ids: int, **fields):
    return {"input_ids": torch.tensor(ids), **fields}


def padded_to(length: int):
    return partial(collate, pad_token_id=0, max_prompt_length=length)


class Numbers:
    """Row i is the prompt [i + 1, i + 1, ...] of i + 1 tokens."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, number: int):
        return row(*[number + 1] * (number + 1), index=number)


def test_prompts_are_padded_on_the_left():
    batch = collate([row(7, 99), row(4, 5, 6, 9)], pad_token_id=99, max_prompt_length=4)
    assert batch.batch["input_ids"].tolist() == [[99, 99, 7, 99], [4, 5, 6, 9]]
    assert batch.batch["attention_mask"].tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]  # also to a token 99
    assert batch.batch["position_ids"].tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]
    assert {tensor.dtype for tensor in batch.batch.values()} == {torch.int64}


def test_rows_that_are_padded_as_verls_have_the_same_batch():
    padded = {"attention_mask": torch.tensor([0, 0, 1, 1]), "position_ids": torch.tensor([0, 0, 0, 1])}
    batch = collate([row(5, 5, 7, 9, **padded)], pad_token_id=99, max_prompt_length=3)
    assert batch.batch["input_ids"].tolist() == [[99, 7, 9]]
    assert batch.batch["attention_mask"].tolist() == [[0, 1, 1]]
    assert batch.batch["position_ids"].tolist() == [[0, 0, 1]]
    assert not batch.non_tensor_batch


def test_other_fields_become_object_columns_even_when_they_look_like_a_matrix():
    rows = [
        row(1, raw_prompt_ids=[1, 2], reward_model={"ground_truth": "3"}),
        row(2, raw_prompt_ids=[3, 4], reward_model={}),
    ]
    batch = collate(rows, pad_token_id=0, max_prompt_length=3)
    assert batch.non_tensor_batch["raw_prompt_ids"].shape == (2,)
    assert batch.non_tensor_batch["raw_prompt_ids"][1] == [3, 4]
    assert batch.non_tensor_batch["reward_model"][0] == {"ground_truth": "3"}
    assert "input_ids" not in batch.non_tensor_batch
    assert len(batch) == 2


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ([row(1), row(1, 2, 3)], ["row 1", "3", "limit is 2"]),
        ([row(1, index=0), row(2, ability="math")], ["row 1", "'ability'", "'index'"]),
    ],
)
def test_rows_that_cannot_form_a_batch_are_an_error(rows, parts):
    with pytest.raises(DataError, match=naming(*parts)):
        collate(rows, pad_token_id=0, max_prompt_length=2)


def test_the_training_loader_goes_on_for_ever_and_resumes():
    def build() -> PromptLoader:
        return PromptLoader(Numbers(5), EpochSampler(5, 2, seed=4), padded_to(5))

    loader = build()
    assert len(loader) == 2
    straight = [batch.non_tensor_batch["index"].tolist() for batch in islice(loader, 7)]
    interrupted = build()
    for _ in islice(interrupted, 3):
        pass
    resumed = build()
    resumed.batches.load_state_dict(interrupted.batches.state_dict())
    assert [batch.non_tensor_batch["index"].tolist() for batch in islice(resumed, 4)] == straight[3:]


def test_the_training_loader_can_keep_the_order_of_the_file():
    loader = PromptLoader(Numbers(4), EpochSampler(4, 2, seed=4, shuffle=False), padded_to(4))
    first = next(iter(loader))
    assert first.batch["input_ids"].tolist() == [[0, 0, 0, 1], [0, 0, 2, 2]]


def test_the_validation_loader_gives_every_row_once_each_time():
    loader = PromptLoader(Numbers(5), one_pass(5, 2), padded_to(5))
    for _ in range(2):
        assert [batch.non_tensor_batch["index"].tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
    assert len(loader) == 3
