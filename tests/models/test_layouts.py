"""A mini-batch has one gradient: padded or packed, cut by rows or by tokens, on one rank or on two."""

from __future__ import annotations

import pytest
import torch
import ulysses_jobs as jobs
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from strop.controller.pools import Role
from strop.engines.micro_batches import MicroBatching

import tiny_model
from ranks import Ranks

PACKED = ("actor_rollout_ref.model.use_remove_padding=true",)
LONGEST = 13
FIXED, DYNAMIC = MicroBatching(rows=2), MicroBatching(max_tokens=LONGEST + 3)
LAYOUTS = {
    "padded, by rows": (1, FIXED, ()),
    "padded, by tokens": (1, DYNAMIC, ()),
    "packed, whole": (1, MicroBatching(rows=8), PACKED),
    "packed, by tokens": (1, DYNAMIC, PACKED),
    "padded, by tokens, on 2 ranks": (2, DYNAMIC, ()),
    "packed, by tokens, on 2 ranks": (2, DYNAMIC, PACKED),
}
EDGES = [
    [(1, 1), (3, 1), (2, 1)],  # single-token responses
    [(7, 6)] * 5,  # every response is cut at the limit, and every sequence as long as can be
    [(3, 0), (7, 6), (2, 0)],  # rows without anything to learn from
    [(7, 6), (7, 6), (7, 6), (1, 1)],  # by tokens, the rank with the short row has a pass less
]


@st.composite
def mini_batches(draw) -> jobs.Lengths:
    """Up to six rows, one at least with something to learn from; now and then all are truncated."""
    lengths = draw(st.lists(st.tuples(st.integers(1, 7), st.integers(0, 6)), min_size=1, max_size=6))
    if draw(st.booleans()):
        lengths = [(prompt, 6) for prompt, _ in lengths]
    return lengths if any(response for _, response in lengths) else [*lengths, (2, 3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model.save(tmp_path_factory.mktemp("tiny"), hidden=32)


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2) as processes:
        yield processes


@pytest.mark.parametrize("role", [Role.Actor, Role.Critic])
@settings(max_examples=2, derandomize=True, phases=[Phase.generate])
@given(drawn=st.lists(mini_batches(), min_size=3, max_size=3))
def test_one_gradient_whatever_the_layout(ranks, folder, role, drawn):
    batches, mode = [*EDGES, *drawn], "token-mean"
    [expected] = ranks.run(1, jobs.gradients, folder, role, batches, MicroBatching(rows=8), mode)
    for layout, (size, micro, keys) in LAYOUTS.items():
        for found in ranks.run(size, jobs.gradients, folder, role, batches, micro, mode, *keys):
            for lengths, (ours, metrics), (theirs, their_metrics) in zip(
                batches, found, expected, strict=True
            ):
                a, b = (torch.cat([w.double().flatten() for w in side.values()]) for side in (ours, theirs))
                assert (a - b).norm() <= 1e-6 * b.norm(), (layout, lengths)
                assert metrics == pytest.approx(their_metrics, rel=1e-4, abs=1e-6)


@settings(max_examples=2, derandomize=True, phases=[Phase.generate])
@given(drawn=st.lists(mini_batches(), min_size=8, max_size=8), cap=st.integers(LONGEST, 2 * LONGEST))
@pytest.mark.parametrize("keys", [(), PACKED], ids=["padded", "packed"])
def test_ranks_take_as_many_passes_as_one_another_and_none_above_the_cap(ranks, folder, keys, drawn, cap):
    batches, empty = [*EDGES, *drawn], 0
    by_rank = ranks.run(2, jobs.passes, folder, batches, MicroBatching(max_tokens=cap), *keys)
    for lengths, *of_ranks in zip(batches, *by_rank, strict=True):
        assert len({len(passes) for passes in of_ranks}) == 1
        learned = 0
        for tokens, places, to_learn in (one for passes in of_ranks for one in passes):
            assert (tokens if keys else places) <= cap
            learned += to_learn
            empty += to_learn == 0
        assert learned == sum(response for _, response in lengths)
    assert empty  # else nobody had to keep another company
