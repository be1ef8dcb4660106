"""Sessions whose tokens form a tree: their rows, their leaves, and what estimators make of them."""

from __future__ import annotations

import random

import pytest
import token_trees
import torch

from strop.algorithms.advantages import gae, turn_level, turns_of
from strop.algorithms.token_tree import (
    NOTHING,
    PROMPT,
    Call,
    computed_tokens,
    has_branches,
    leaves,
    paths,
    plain,
    row_of,
)

SESSION = [
    Call(PROMPT, [], [11, 12]),  # the main agent
    Call(NOTHING, [21, 22], [23]),  # a sub-agent, with a context of its own
    Call(1, [24], [25, 26]),  # and its second turn
    Call(0, [13], [14]),  # the main agent goes on
    Call(NOTHING, [31], [32, 33]),  # with a compacted history
]


def test_the_row_of_a_session_has_its_calls_in_order_and_what_each_token_follows():
    row = row_of(SESSION)
    assert row.ids == [11, 12, 21, 22, 23, 24, 25, 26, 13, 14, 31, 32, 33]
    assert [int(sampled) for sampled in row.sampled] == [1, 1, 0, 0, 1, 0, 1, 1, 0, 1, 0, 1, 1]
    assert row.follows == [-1, 0, -2, 2, 3, 4, 5, 6, 1, 8, -2, 10, 11]
    chain = row_of([Call(PROMPT, [], [11, 12]), Call(0, [13], [14])])
    assert chain.follows == plain(1, 4)[0].tolist()


def test_a_call_that_continues_a_later_one_or_samples_after_nothing_is_an_error():
    for calls in ([Call(0, [3], [4])], [Call(NOTHING, [], [4])]):
        with pytest.raises(ValueError, match="call 0"):
            row_of(calls)


def test_leaves_are_ranges_of_tokens_from_the_root_on():
    assert paths(torch.tensor(row_of(SESSION).follows)) == [
        (NOTHING, [range(2, 8)]),
        (PROMPT, [range(2), range(8, 10)]),
        (NOTHING, [range(10, 13)]),
    ]
    # a branch may leave from the middle of a run of tokens
    assert paths(torch.tensor([-1, 0, 1, 2, 1, 4])) == [
        (PROMPT, [range(4)]),
        (PROMPT, [range(2), range(4, 6)]),
    ]


def test_leaves_have_each_sampled_token_once_and_count_what_passes_compute():
    batch = token_trees.random_batch(60, seed=5)
    expected = [(row, ids, [place for place, _ in own]) for row, ids, own in token_trees.sequences(batch)]
    found = [
        (
            leaf.row,
            batch["input_ids"][leaf.row, leaf.columns_K].tolist(),
            leaf.own_K.nonzero()[:, 0].tolist(),
        )
        for leaf in leaves(batch)
    ]
    assert sorted(found) == sorted(expected)
    assert 10 < int(has_branches(batch["follows"]).sum()) < 60
    tokens = [0] * 60
    for row, ids, _ in expected:
        tokens[row] += len(ids)
    assert computed_tokens(batch) == tokens


def test_a_second_call_with_the_same_context_is_a_turn_of_its_own():
    row = row_of([Call(PROMPT, [], [11, 12]), Call(PROMPT, [], [13]), Call(0, [14], [15])])
    mask, follows = torch.tensor([row.sampled]).float(), torch.tensor([row.follows])
    assert turns_of(mask, follows).tolist() == [[0, 0, 1, -1, 2]]
    rewards = torch.tensor([[0.0, 1, 2, 0, 4], [0, 0, 0, 0, 0]])
    advantages, returns = turn_level(
        rewards, mask.repeat(2, 1), ["a", "a"], follows=follows.repeat(2, 1), norm_by_std=False
    )
    assert returns[0].tolist() == [7, 7, 6, 0, 4]
    assert advantages.tolist() == [[3.5, 3.5, 3, 0, 2], [-3.5, -3.5, -3, 0, -2]]


def oracle_of_gae(
    calls: list[Call], rewards: list[float], values: list[float], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """Return advantages and returns of a session's sampled tokens, from the last one to the first.

    A session is one episode: the state after a sampled token is the one in which the next token is sampled,
    in the order of the calls, whatever the context of that call. After the last one nothing follows.
    """
    states = [(number, place) for number, call in enumerate(calls) for place in range(len(call.sampled))]
    advantages, returns = dict.fromkeys(states, 0.0), dict.fromkeys(states, 0.0)
    reward, value = (dict(zip(states, numbers, strict=True)) for numbers in (rewards, values))
    for index in reversed(range(len(states))):
        state = states[index]
        if index + 1 < len(states):
            after = states[index + 1]
            next_value, next_advantage = value[after], advantages[after]
        else:
            next_value = next_advantage = 0.0
        delta = reward[state] + gamma * next_value - value[state]
        advantages[state] = delta + gamma * lam * next_advantage
        returns[state] = advantages[state] + value[state]
    return [advantages[state] for state in states], [returns[state] for state in states]


def test_gae_discounts_by_sampled_tokens_in_the_order_of_calls():
    draw = random.Random(2)
    sessions = [SESSION, *(token_trees.calls_of(draw) for _ in range(30))]
    batch = token_trees.batch_of(sessions)
    mask = batch["response_mask"].bool()
    rewards, values = (
        torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for seed in (1, 2)
    )
    options = {"gamma": 0.97, "lam": 0.9}
    advantages, returns = gae(rewards, values, mask, whiten=False, **options)
    for row, calls in enumerate(sessions):
        own = mask[row]
        expected = oracle_of_gae(calls, rewards[row, own].tolist(), values[row, own].tolist(), **options)
        assert advantages[row, own].tolist() == pytest.approx(expected[0], abs=1e-12)
        assert returns[row, own].tolist() == pytest.approx(expected[1], abs=1e-12)
