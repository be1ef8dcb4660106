from __future__ import annotations

import itertools
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.data.loader import EpochSampler, one_pass
from strop.errors import CheckpointError, DataError

from messages import naming

sizes = st.tuples(st.integers(1, 40), st.integers(1, 10)).filter(lambda size: size[0] >= size[1])


def take(sampler: EpochSampler, count: int) -> list[list[int]]:
    return list(islice(sampler, count))


@given(size=sizes, seed=st.integers(0, 2**40), before=st.integers(0, 60))
def test_resuming_anywhere_gives_the_same_batches(size, seed, before):
    rows, batch = size
    straight = EpochSampler(rows, batch, seed)
    whole = take(straight, before + 30)
    stopped = EpochSampler(rows, batch, seed)
    take(stopped, before)
    resumed = EpochSampler(rows, batch, seed)
    resumed.load_state_dict(stopped.state_dict())
    assert take(resumed, 30) == whole[before:]
    assert resumed.state_dict() == straight.state_dict()


@given(size=sizes, seed=st.integers(0, 100))
def test_an_epoch_has_every_row_at_most_once(size, seed):
    rows, batch = size
    sampler = EpochSampler(rows, batch, seed)
    assert len(sampler) == rows // batch
    batches = take(sampler, len(sampler))
    assert {len(numbers) for numbers in batches} == {batch}
    assert len({number for numbers in batches for number in numbers}) == batch * (rows // batch)


def test_each_epoch_and_each_seed_has_its_own_order():
    sampler = EpochSampler(50, 50, seed=1)
    first, second = next(sampler), next(sampler)
    other = next(EpochSampler(50, 50, seed=2))
    assert sorted(first) == sorted(second) == sorted(other) == list(range(50))
    assert first != second
    assert first != other
    # A pure function of (seed, epoch): the second epoch does not need the first.
    direct = EpochSampler(50, 50, seed=1)
    direct.load_state_dict({**direct.state_dict(), "epoch": 1})
    assert next(direct) == second


def test_without_shuffle_rows_come_in_order_every_epoch():
    sampler = EpochSampler(5, 2, seed=3, shuffle=False)
    assert take(sampler, 4) == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_too_few_rows_are_refused_with_both_numbers():
    with pytest.raises(DataError, match=naming("3 rows", "8")):
        EpochSampler(3, 8, seed=1)


def test_a_state_of_other_data_is_refused_by_name():
    state = EpochSampler(10, 2, seed=1).state_dict()
    with pytest.raises(CheckpointError, match=naming("num_rows", "10", "12")):
        EpochSampler(12, 2, seed=1).load_state_dict(state)
    with pytest.raises(CheckpointError, match=naming("batch_size: 2", "5", "seed: 1")):
        EpochSampler(10, 5, seed=2).load_state_dict(state)


@pytest.mark.parametrize(
    ("now", "keep_rest", "place"),
    [
        ((12, 2, 1), False, (1, 2)),  # 8 batches: one epoch of 6, and 2
        ((10, 4, 1), False, (4, 0)),
        ((10, 4, 1), True, (2, 2)),
        ((10, 2, 2), False, (1, 3)),
    ],
)
def test_with_other_data_the_next_batch_of_its_order_follows(now, keep_rest, place, caplog):
    before, sampler = EpochSampler(10, 2, seed=1), EpochSampler(*now, keep_rest=keep_rest)
    take(before, 8)
    sampler.load_state_dict(before.state_dict(), may_differ=True)
    assert (sampler.epoch, sampler.position) == place
    assert "another order" in caplog.text
    direct = EpochSampler(*now, keep_rest=keep_rest)
    assert take(direct, 9)[8] == next(sampler)


def test_one_pass_keeps_the_smaller_last_batch():
    batches = one_pass(7, 3)
    assert len(batches) == 3
    assert list(batches) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(batches) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(one_pass(3, 100)) == [[0, 1, 2]]
    assert list(one_pass(6, 3)) == [[0, 1, 2], [3, 4, 5]]


def test_rows_that_fill_no_batch_are_a_last_smaller_one_if_they_are_kept():
    sampler = EpochSampler(7, 3, seed=5, keep_rest=True)
    epochs = [take(sampler, len(sampler)) for _ in range(2)]
    assert [[len(batch) for batch in epoch] for epoch in epochs] == [[3, 3, 1]] * 2
    assert [sorted(itertools.chain(*epoch)) for epoch in epochs] == [list(range(7))] * 2
    assert (sampler.epoch, sampler.position) == (2, 0)
