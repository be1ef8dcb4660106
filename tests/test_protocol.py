from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strop.protocol import DataProto
from strop.rewards.reward_output import RewardOutput

from messages import naming


def _three_rows() -> DataProto:
    return DataProto.from_dict(
        {"ids": torch.tensor([[1, 2], [3, 4], [5, 6]])},
        {"uid": ["a", "b", "c"], "messages": [[1], [2], [3]]},
        {"step": 4},
    )


def test_columns_of_different_length_are_refused():
    with pytest.raises(ValueError, match=naming("ids", "3", "uid", "2")):
        DataProto.from_dict({"ids": torch.zeros(3, 1)}, {"uid": ["a", "b"]})


def test_lists_of_equal_length_stay_objects_and_do_not_become_a_matrix():
    assert _three_rows().non_tensor_batch["messages"].shape == (3,)
    assert _three_rows().non_tensor_batch["messages"][1] == [2]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (slice(0, 2), ["a", "b"]),
        ([2, 0], ["c", "a"]),
        (torch.tensor([1, 1]), ["b", "b"]),
        (torch.tensor([True, False, True]), ["a", "c"]),
        (np.array([0]), ["a"]),
    ],
)
def test_rows_are_taken_from_tensors_and_objects_alike(rows, expected):
    taken = _three_rows()[rows]
    assert list(taken.non_tensor_batch["uid"]) == expected
    assert taken.batch["ids"][:, 0].tolist() == [{"a": 1, "b": 3, "c": 5}[uid] for uid in expected]
    assert taken.meta_info == {"step": 4}


def test_one_row_has_no_row_dimension_and_ends_iteration():
    """As verl's reward managers read their batch."""
    data = _three_rows()
    assert data.batch.batch_size == torch.Size([3])
    for item in (data[1], data[np.int64(1)], data[-2], list(data)[1]):
        assert item.batch["ids"].tolist() == [3, 4]
        assert item.non_tensor_batch == {"uid": "b", "messages": [2]}
        assert item.meta_info == {"step": 4}
    assert [item.non_tensor_batch["uid"] for item in data] == ["a", "b", "c"]
    for row in (3, -4):
        with pytest.raises(IndexError, match=naming(row, "3")):
            data[row]
    assert DataProto().batch.batch_size == torch.Size([0])
    assert data[:2].batch.batch_size == torch.Size([2])


def test_union_takes_both_and_refuses_a_column_that_differs():
    data = _three_rows()
    joined = data.union(DataProto({"values": torch.ones(3, 2)}, {}, {"more": 1}))
    assert set(joined.batch) == {"ids", "values"}
    assert joined.meta_info == {"step": 4, "more": 1}
    assert "values" not in data
    with pytest.raises(ValueError, match="'ids'"):
        data.union(DataProto({"ids": torch.zeros(3, 2, dtype=torch.long)}))
    with pytest.raises(ValueError, match="'uid'"):
        data.union(DataProto.from_dict(non_tensors={"uid": ["a", "b", "x"]}))
    with pytest.raises(ValueError, match=naming("3 rows", "2 rows")):
        data.union(DataProto({"other": torch.zeros(2)}))


def test_repeat_keeps_the_samples_of_a_prompt_adjacent_when_interleaved():
    assert list(_three_rows().repeat(2).non_tensor_batch["uid"]) == ["a", "a", "b", "b", "c", "c"]
    assert list(_three_rows().repeat(2, interleave=False).non_tensor_batch["uid"]) == list("abcabc")
    assert _three_rows().repeat(2).batch["ids"][:, 0].tolist() == [1, 1, 3, 3, 5, 5]


def test_pop_moves_columns_out_and_names_what_is_missing():
    data = _three_rows()
    taken = data.pop("ids", "uid")
    assert set(taken.batch) == {"ids"}
    assert list(data.non_tensor_batch) == ["messages"]
    with pytest.raises(KeyError, match=r"\['ids'\].*messages"):
        data.select("ids")


def test_chunk_needs_equal_parts():
    with pytest.raises(ValueError, match=naming("3 rows", "2")):
        _three_rows().chunk(2)
    assert [len(part) for part in _three_rows().chunk(3)] == [1, 1, 1]


def test_concat_refuses_parts_with_other_columns():
    with pytest.raises(ValueError, match=naming("uid")):
        DataProto.concat([_three_rows(), _three_rows().select("ids", "messages")])


@given(st.integers(1, 30), st.integers(1, 12))
def test_concat_undoes_split(rows: int, size: int):
    data = DataProto.from_dict({"x": torch.arange(rows)}, {"name": [str(i) for i in range(rows)]})
    again = DataProto.concat(data.split(size))
    assert torch.equal(again.batch["x"], data.batch["x"])
    assert list(again.non_tensor_batch["name"]) == list(data.non_tensor_batch["name"])


def test_columns_are_selected_by_kind():
    """verl: ``pop`` takes what is named, ``select`` also the whole kind that is not named."""
    data = _three_rows()
    assert set(data.select(batch_keys=["ids"]).non_tensor_batch) == {"uid", "messages"}
    assert list(data.select(non_tensor_batch_keys=["uid"]).batch) == ["ids"]
    assert [*data.select("uid").batch, *data.select("uid").non_tensor_batch] == ["uid"]
    taken = data.pop(batch_keys=["ids"], non_tensor_batch_keys=["uid"])
    assert (list(taken.batch), list(taken.non_tensor_batch)) == (["ids"], ["uid"])
    assert (list(data.batch), list(data.non_tensor_batch)) == ([], ["messages"])
    with pytest.raises(KeyError, match="ids"):
        data.pop(batch_keys=["ids"], non_tensor_batch_keys=None)


def test_names_of_verl_for_operations():
    data = _three_rows()
    assert list(data.repeat(repeat_times=2, interleave=True).non_tensor_batch["uid"]) == list("aabbcc")
    assert [len(part) for part in data.chunk(chunks=3)] == [1, 1, 1]
    assert data.rename(old_keys=["ids"], new_keys=["tokens"]) is data
    assert list(data.batch) == ["tokens"]
    assert list(data.rename("tokens", "ids").batch) == ["ids"]
    with pytest.raises(KeyError, match="uid"):
        data.rename("uid", "id")
    assert data.batch.batch_size == torch.Size([3])
    columns = {"ids": torch.ones(2, 1), "uid": np.array(["a", "b"], dtype=object), "tags": [[1], [2]]}
    found = DataProto.from_single_dict(columns, meta_info={"step": 1})
    assert (list(found.batch), list(found.non_tensor_batch)) == (["ids"], ["uid", "tags"])
    assert found.meta_info == {"step": 1}
    assert DataProto.from_single_dict(found) is found


def test_mini_batches_are_iterated_in_the_order_of_torchs_loader():
    data = DataProto.from_dict({"x": torch.arange(6)}, {"name": list("abcdef")}, {"step": 4})
    parts = list(data.make_iterator(mini_batch_size=2, epochs=2))
    assert [part.batch["x"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]] * 2
    assert list(parts[1].non_tensor_batch["name"]) == ["c", "d"]
    assert parts[1].meta_info == {"step": 4}
    drawn = data.make_iterator(3, epochs=2, seed=5, dataloader_kwargs={"shuffle": True})
    generator = torch.Generator().manual_seed(5)
    loader = torch.utils.data.DataLoader(torch.arange(6), 3, shuffle=True, generator=generator)
    assert [part.batch["x"].tolist() for part in drawn] == [x.tolist() for _ in range(2) for x in loader]
    with pytest.raises(ValueError, match=naming("6", "4")):
        data.make_iterator(4, epochs=1)


def test_the_output_of_a_reward_manager_is_stored_as_its_scores():
    data, scores = _three_rows(), torch.ones(3, 2)
    data.batch["token_level_scores"] = RewardOutput(scores, {}, {}, [], [""] * 3)
    assert data.batch["token_level_scores"] is scores
    data.batch["token_level_scores"] = {"reward_tensor": -scores, "reward_extra_info": {}}
    assert torch.equal(data.batch["token_level_scores"], -scores)
