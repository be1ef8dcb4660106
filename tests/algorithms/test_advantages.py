from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from strop.algorithms.advantages import (
    ESTIMATORS,
    estimate,
    gae,
    get_estimator,
    grpo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
)
from strop.protocol import DataProto
from strop.verl import compute_advantage

from messages import naming

NAN, INF = math.nan, math.inf


def rows(*values):
    return torch.tensor(values)


def outcome(scores, length=2):
    """Rewards with the score on the last of ``length`` tokens, then one poisoned slot; and the mask."""
    rewards = torch.zeros(len(scores), length + 1)
    rewards[:, length - 1] = torch.tensor(scores)
    rewards[:, length] = NAN
    mask = torch.ones_like(rewards)
    mask[:, length] = 0
    return rewards, mask


def first_tokens(advantages):
    """The advantage of each sequence, having checked that all its tokens have it and padding has none."""
    assert_close(advantages[:, 0], advantages[:, 1])
    assert advantages[:, 2].abs().max() == 0
    return advantages[:, 0]


# ---- gae


@pytest.mark.parametrize(
    ("whiten", "expected"),
    [
        (False, [1.4375, 1.75, 1.0]),
        # mean 1.3958333; squares 0.0017361 + 0.1254340 + 0.1566840 = 0.2838542; / 2; root 0.3767321
        (True, [0.1106003, 0.9401023, -1.0507025]),
    ],
)
def test_gae_by_hand(whiten, expected):
    # t=2: delta = 4 + 0 - 3 = 1; A = 1
    # t=1: delta = 2 + 0.5 x 3 - 2 = 1.5; A = 1.5 + 0.25 x 1 = 1.75
    # t=0: delta = 1 + 0.5 x 2 - 1 = 1; A = 1 + 0.25 x 1.75 = 1.4375
    rewards, values = rows([1.0, 2.0, 4.0]), rows([1.0, 2.0, 3.0])
    advantages, returns = gae(rewards, values, torch.ones(1, 3), gamma=0.5, lam=0.5, whiten=whiten)
    assert_close(advantages, rows(expected), atol=1e-6, rtol=0)
    assert returns.tolist() == [[2.4375, 3.75, 4.0]]


@given(
    st.lists(
        st.tuples(st.floats(-5, 5), st.floats(-5, 5), st.booleans()), min_size=1, max_size=12
    ),
    st.floats(0, 1),
    st.floats(0, 1),
)  # fmt: skip
def test_gae_is_the_discounted_sum_of_the_deltas_of_the_sampled_tokens(tokens, gamma, lam):
    kept = [(reward, value) for reward, value, sampled in tokens if sampled]
    deltas = [
        reward + (gamma * kept[i + 1][1] if i + 1 < len(kept) else 0) - value
        for i, (reward, value) in enumerate(kept)
    ]
    expected = [
        sum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(deltas))) for i in range(len(deltas))
    ]
    rewards, values, mask = (
        torch.tensor([column], dtype=torch.float64) for column in zip(*tokens, strict=True)
    )
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam, whiten=False)
    assert_close(advantages[mask.bool()], torch.tensor(expected, dtype=torch.float64))
    assert_close(returns[mask.bool()] - values[mask.bool()], advantages[mask.bool()])
    assert advantages[~mask.bool()].abs().sum() == 0


# ---- grpo


@pytest.mark.parametrize(
    ("norm_by_std", "expected"),
    [
        # (s - mean) / (std + 1e-6)
        # a: 1, 3: mean 2, std sqrt(2); b: 2, 2, 5: mean 3, squares 1 + 1 + 4 = 6, / 2, std sqrt(3);
        # a group of one: 0
        (True, [-0.7071063, -0.5773499, -0.5773499, 0.7071063, 1.1546999, 0.0]),
        (False, [-1.0, -1.0, -1.0, 1.0, 2.0, 0.0]),
    ],
)
def test_grpo_by_hand_with_groups_out_of_order(norm_by_std, expected):
    scores = [1.0, 2.0, 2.0, 3.0, 5.0, 3.0]
    rewards, mask = outcome(scores)
    advantages, returns = grpo(rewards, mask, ["a", "b", "b", "a", "b", "alone"], norm_by_std=norm_by_std)
    assert_close(first_tokens(advantages), torch.tensor(expected), atol=2e-7, rtol=0)
    assert first_tokens(returns).tolist() == scores


def test_the_score_of_a_sequence_is_the_sum_over_its_sampled_tokens():
    # 1 + 2 = 3 and 5: mean 4
    rewards = rows([1.0, NAN, 2.0, INF], [5.0, NAN, NAN, NAN])
    mask = rows([1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0])
    advantages, returns = grpo(rewards, mask, ["a", "a"], norm_by_std=False)
    assert advantages.tolist() == [[-1.0, 0.0, -1.0, 0.0], [1.0, 0.0, 0.0, 0.0]]
    assert returns.tolist() == [[3.0, 0.0, 3.0, 0.0], [5.0, 0.0, 0.0, 0.0]]


def test_equal_scores_have_no_advantage_although_their_mean_is_rounded():
    rewards, mask = outcome([0.1] * 7 + [0.7] * 3)
    advantages, _ = grpo(rewards, mask, ["a"] * 7 + ["b"] * 3, norm_by_std=True)
    assert advantages.abs().max() < 1e-6


def test_a_group_with_equal_scores_is_not_divided_by_the_deviation_of_its_kl():
    # a: scores 0, 0 and rewards of -1e-3 and -3e-3: mean -2e-3. b: scores 0, 1, in either case divided:
    # rewards -1e-3 and 0.997, mean 0.498, deviation 0.998 / sqrt(2) = 0.7056926, + 1e-6. c: scores that
    # differ by 5e-7. d: by 2e-6, with rewards 0, 2e-6: deviation 1.4142136e-6, + 1e-6
    rewards, mask = outcome([-1e-3, -3e-3, -1e-3, 0.997, 0.1, -0.1, 0.0, 2e-6])
    scores = torch.tensor([0.0, 0.0, 0.0, 1.0, 7.0, 7.0 - 5e-7, 0.0, 2e-6])
    uid = ["a", "a", "b", "b", "c", "c", "d", "d"]
    advantages, returns = grpo(rewards, mask, uid, scores, norm_by_std=True)
    expected = [1e-3, -1e-3, -0.7071058, 0.7071058, 0.1, -0.1, -0.4142136, 0.4142136]
    assert_close(first_tokens(advantages), torch.tensor(expected), atol=1e-6, rtol=0)
    assert_close(first_tokens(returns), rewards[:, 1])
    # without the scores rewards are the scores, and are divided
    advantages, _ = grpo(rewards[:2], mask[:2], uid[:2], norm_by_std=True)
    assert first_tokens(advantages).abs().min() > 0.7


def test_a_batch_of_groups_with_equal_scores_is_not_whitened():
    rewards, mask = outcome([-1e-3, -3e-3, 0.5, 0.502])
    uid, equal = ["a", "a", "b", "b"], torch.tensor([0.0, 0.0, 0.5, 0.5])
    plain, _ = reinforce_plus_plus_baseline(rewards, mask, uid, equal, whiten=True)
    assert_close(first_tokens(plain), torch.tensor([1e-3, -1e-3, -1e-3, 1e-3]), atol=1e-6, rtol=0)
    whitened, _ = reinforce_plus_plus_baseline(rewards, mask, uid, equal + rewards[:, 1], whiten=True)
    assert first_tokens(whitened).abs().min() > 0.9


def test_estimators_get_the_scores_before_the_penalty_by_name():
    def own(rewards, response_mask, scores):
        return scores.unsqueeze(-1) * response_mask, rewards * 0

    rewards, mask = outcome([1.0, 2.0])
    advantages, _ = estimate(own, response_mask=mask, rewards=rewards, scores=torch.tensor([3.0, 4.0]))
    assert first_tokens(advantages).tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    "uid", [np.array(["x", "y", "x"], dtype=object), np.array([7, 8, 7]), [("p", 1), ("p", 2), ("p", 1)]]
)
def test_uids_may_be_an_array_or_any_hashables(uid):
    rewards, mask = outcome([1.0, 9.0, 3.0])
    assert first_tokens(rloo(rewards, mask, uid)[0]).tolist() == [-2.0, 0.0, 2.0]


def test_uids_must_be_as_many_as_samples():
    rewards, mask = outcome([1.0, 2.0])
    with pytest.raises(ValueError, match=naming("3", "2", "uid")):
        grpo(rewards, mask, ["a", "a", "b"], norm_by_std=True)


# ---- reinforce_plus_plus


def test_reinforce_plus_plus_by_hand():
    # row 1: 4; 2 + 0.5 x 4 = 4; 1 + 0.5 x 4 = 3; row 2, over its hole: 2; 1 + 0.5 x 2 = 2
    rewards = rows([1.0, 2.0, 4.0], [1.0, NAN, 2.0])
    mask = rows([1.0, 1.0, 1.0], [1.0, 0.0, 1.0])
    advantages, returns = reinforce_plus_plus(rewards, mask, gamma=0.5, whiten=False)
    assert advantages.tolist() == returns.tolist() == [[3.0, 4.0, 4.0], [2.0, 0.0, 2.0]]
    # mean 3, variance (0 + 1 + 1 + 1 + 1) / 4 = 1
    advantages, returns = reinforce_plus_plus(rewards, mask, gamma=0.5, whiten=True)
    assert_close(advantages, rows([0.0, 1.0, 1.0], [-1.0, 0.0, -1.0]))
    assert returns.tolist() == [[3.0, 4.0, 4.0], [2.0, 0.0, 2.0]]


def test_reinforce_plus_plus_baseline_by_hand():
    # centred: a -1, 1; alone 0; over tokens -1, -1, 0, 1: mean -1/4, squares 2.75, / 3, root 0.9574271
    rewards = rows([1.0, 0.0], [5.0, NAN], [3.0, NAN])
    mask = rows([1.0, 1.0], [1.0, 0.0], [1.0, 0.0])
    uid = ["a", "alone", "a"]
    advantages, returns = reinforce_plus_plus_baseline(rewards, mask, uid, whiten=True)
    assert_close(advantages, rows([-0.7833495, -0.7833495], [0.2611165, 0.0], [1.3055824, 0.0]))
    assert returns.tolist() == [[1.0, 1.0], [5.0, 0.0], [3.0, 0.0]]
    advantages, _ = reinforce_plus_plus_baseline(rewards, mask, uid, whiten=False)
    assert advantages.tolist() == [[-1.0, -1.0], [0.0, 0.0], [1.0, 0.0]]


# ---- rloo and remax


def test_rloo_by_hand():
    # a: 1 - 3, 3 - 1; b: 2 - (2 + 5)/2, the same, 5 - 2; alone: 0
    rewards, mask = outcome([1.0, 2.0, 2.0, 3.0, 5.0, 8.0])
    advantages, returns = rloo(rewards, mask, ["a", "b", "b", "a", "b", "alone"])
    assert_close(first_tokens(advantages), torch.tensor([-2.0, -1.5, -1.5, 2.0, 3.0, 0.0]))
    assert first_tokens(returns).tolist() == [1.0, 2.0, 2.0, 3.0, 5.0, 8.0]


def test_remax_by_hand():
    rewards = rows([0.0, 1.0, 2.0], [1.0, NAN, 4.0], [3.0, NAN, INF])
    mask = rows([1.0, 1.0, 1.0], [1.0, 0.0, 1.0], [1.0, 0.0, 0.0])
    advantages, returns = remax(rewards, mask, torch.tensor([2.0, 0.5, -1.0]))
    assert returns.tolist() == [[3.0, 3.0, 2.0], [5.0, 0.0, 4.0], [3.0, 0.0, 0.0]]
    assert advantages.tolist() == [[1.0, 1.0, 0.0], [4.5, 0.0, 3.5], [4.0, 0.0, 0.0]]


# ---- all of them


def everything(n_samples=6, length=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(n_samples, length, generator=generator) < 0.7).float()
    mask[:, 0] = 1
    return {
        "rewards": torch.randn(n_samples, length, generator=generator),
        "response_mask": mask,
        "values": torch.randn(n_samples, length, generator=generator),
        "uid": ["a", "b", "c", "a", "b", "b"][:n_samples],
        "baseline_scores": torch.randn(n_samples, generator=generator),
        "gamma": 0.9,
        "lam": 0.8,
        "whiten": True,
        "norm_by_std": True,
    }


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_poisoned_padding_changes_nothing_and_results_have_no_gradient(name):
    clean = everything()
    hidden = clean["response_mask"] == 0
    expected = estimate(get_estimator(name), **clean)
    for poison in (NAN, INF, -1e30):
        poisoned = clean | {
            column: clean[column].masked_fill(hidden, poison).requires_grad_()
            for column in ("rewards", "values")
        }
        for found, wanted in zip(estimate(get_estimator(name), **poisoned), expected, strict=True):
            assert found.dtype == torch.float32
            assert not found.requires_grad
            assert torch.equal(found, wanted)
            assert found[hidden].abs().sum() == 0


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_the_order_of_the_rows_does_not_matter(name):
    straight = everything()
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    shuffled = {
        column: value[order] if isinstance(value, torch.Tensor) else value
        for column, value in straight.items()
    }
    shuffled["uid"] = [straight["uid"][i] for i in order]
    for found, wanted in zip(
        estimate(get_estimator(name), **shuffled), estimate(get_estimator(name), **straight), strict=True
    ):
        assert_close(found, wanted[order])


def test_verls_call_takes_the_scores_of_the_batch():
    rewards, mask = outcome([-1e-3, -3e-3])
    columns = {"token_level_rewards": rewards, "response_mask": mask}
    alone = compute_advantage(DataProto({**columns}), "grpo", num_repeat=2)
    assert first_tokens(alone.batch["advantages"]).abs().min() > 0.7
    scored = DataProto({**columns, "token_level_scores": torch.zeros_like(rewards)})
    found = first_tokens(compute_advantage(scored, "grpo", num_repeat=2).batch["advantages"])
    assert_close(found, torch.tensor([1e-3, -1e-3]), atol=1e-6, rtol=0)
