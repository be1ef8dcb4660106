from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.data.loader import EpochSampler, SequentialBatches
from strop.errors import CheckpointError, DataError

from messages import naming

sizes = st.tuples(st.integers(1, 40), st.integers(1, 10)).filter(lambda size: size[0] >= size[1])


def take(sampler: EpochSampler, count: int) -> list[list[int]]:
    return list(islice(sampler, count))


@given(size=sizes, seed=st.integers(0, 2**40), before=st.integers(0, 60), drop_last=st.booleans())
def test_resuming_anywhere_gives_the_same_batches(size, seed, before, drop_last):
    rows, batch = size
    straight = EpochSampler(rows, batch, seed, drop_last=drop_last)
    whole = take(straight, before + 30)
    stopped = EpochSampler(rows, batch, seed, drop_last=drop_last)
    take(stopped, before)
    resumed = EpochSampler(rows, batch, seed, drop_last=drop_last)
    resumed.load_state_dict(stopped.state_dict())
    assert take(resumed, 30) == whole[before:]
    assert resumed.state_dict() == straight.state_dict()


@given(size=sizes, seed=st.integers(0, 100))
def test_an_epoch_has_every_row_at_most_once(size, seed):
    rows, batch = size
    dropping, keeping = EpochSampler(rows, batch, seed), EpochSampler(rows, batch, seed, drop_last=False)
    assert len(dropping) == rows // batch
    batches = take(dropping, len(dropping))
    assert {len(numbers) for numbers in batches} == {batch}
    assert len({number for numbers in batches for number in numbers}) == batch * (rows // batch)
    everything = [number for numbers in take(keeping, len(keeping)) for number in numbers]
    assert sorted(everything) == list(range(rows))
    assert everything[: batch * (rows // batch)] == [number for numbers in batches for number in numbers]


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


@pytest.mark.parametrize(
    ("rows", "batch_size", "seed", "drop_last", "parts"),
    [
        (3, 8, 1, True, ["3 rows", "8"]),
        (0, 8, 1, False, ["0 rows"]),
        (10, 0, 1, True, ["batch_size=0", "seed=1"]),
        (10, 2, -1, True, ["batch_size=2", "seed=-1"]),
    ],
)
def test_impossible_sizes_and_seeds_are_errors(rows, batch_size, seed, drop_last, parts):
    with pytest.raises(DataError, match=naming(*parts)):
        EpochSampler(rows, batch_size, seed, drop_last=drop_last)


def test_a_state_of_other_data_is_refused_by_name():
    state = EpochSampler(10, 2, seed=1).state_dict()
    with pytest.raises(CheckpointError, match=naming("num_rows", "10", "12")):
        EpochSampler(12, 2, seed=1).load_state_dict(state)
    with pytest.raises(CheckpointError, match=naming("batch_size: 2", "5", "seed: 1")):
        EpochSampler(10, 5, seed=2).load_state_dict(state)
    with pytest.raises(CheckpointError, match=naming("5 of 5")):
        EpochSampler(10, 2, seed=1).load_state_dict({**state, "position": 5})


def test_sequential_batches_keep_the_smaller_last_one():
    batches = SequentialBatches(7, 3)
    assert len(batches) == 3
    assert list(batches) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(batches) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(SequentialBatches(3, 100)) == [[0, 1, 2]]
    assert list(SequentialBatches(3, None)) == [[0, 1, 2]]
    assert list(SequentialBatches(6, 3)) == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(DataError, match=naming("batch size 0")):
        SequentialBatches(3, 0)
