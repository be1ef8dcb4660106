from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from strop.algorithms.aggregation import aggregate
from strop.algorithms.policy_loss import POLICY_LOSSES, cispo, gspo, ppo, value_loss
from strop.errors import ConfigError

from messages import naming

NAN, INF = math.nan, math.inf
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}


def of_ratios(function, ratios, advantages, mask=None, **clips):
    """The loss at the given ratios, old log-probs -1, and its gradient by the log-probs of a plain sum."""
    old = torch.full_like(torch.tensor(ratios), -1.0)
    log_prob = (old + torch.tensor(ratios).log()).requires_grad_()
    mask = torch.ones_like(old) if mask is None else torch.tensor(mask)
    result = function(log_prob, old, torch.tensor(advantages), mask, **clips)
    (gradient,) = torch.autograd.grad(result.loss_BT.sum(), log_prob)
    return result, gradient


def test_ppo_by_hand():
    result, gradient = of_ratios(
        ppo, [[1.5, 0.5, 0.5, 1.5, 1.1, 1.0]], [[1.0, 1.0, -1.0, -1.0, 2.0, -3.0]], **CLIP
    )
    # -1.5 or -1.2; -0.5 or -0.8; 0.5 or 0.8; 1.5 or 1.2; within the bounds: -2.2 and 3
    assert_close(result.loss_BT, torch.tensor([[-1.2, -0.5, 0.8, 1.5, -2.2, 3.0]]))
    assert result.clipped_BT.tolist() == [[1.0, 0.0, 1.0, 0.0, 0.0, 0.0]]
    assert_close(result.ratio_BT, torch.tensor([[1.5, 0.5, 0.5, 1.5, 1.1, 1.0]]))
    # d(-A ratio) / d log_prob = -A ratio; 0 where clipped
    assert_close(gradient, torch.tensor([[0.0, -0.5, 0.0, 1.5, -2.2, 3.0]]))


def test_ppo_with_two_bounds():
    result, _ = of_ratios(ppo, [[1.5, 0.5]], [[1.0, -1.0]], clip_ratio_low=0.3, clip_ratio_high=0.28)
    assert_close(result.loss_BT, torch.tensor([[-1.28, 0.7]]))


def test_dual_clip_bounds_the_loss_of_bad_tokens_only():
    result, gradient = of_ratios(
        ppo, [[5.0, 2.0, 0.5, 5.0]], [[-1.0, -1.0, -1.0, 1.0]], clip_ratio_c=3.0, **CLIP
    )
    # 5 -> 3; 2; 0.8 by the lower bound; -1.2 by the upper bound
    assert_close(result.loss_BT, torch.tensor([[3.0, 2.0, 0.8, -1.2]]))
    assert result.clipped_BT.tolist() == [[1.0, 0.0, 1.0, 1.0]]
    assert_close(gradient, torch.tensor([[0.0, 2.0, 0.0, 0.0]]))


def test_dual_clip_must_be_above_1():
    with pytest.raises(ConfigError, match=naming("clip_ratio_c=1.0", "1")):
        of_ratios(ppo, [[1.0]], [[1.0]], clip_ratio_c=1.0, **CLIP)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_the_log_ratio_is_clamped_to_20(name):
    far = torch.tensor([[100.0], [-100.0]], requires_grad=True)
    result = POLICY_LOSSES[name](far, torch.zeros(2, 1), -torch.ones(2, 1), torch.ones(2, 1), **CLIP)
    assert_close(result.ratio_BT, torch.tensor([[4.8516520e8], [2.0611536e-9]]))  # e^20, e^-20
    result.loss_BT.sum().backward()
    assert far.grad.isfinite().all()


def test_approx_kl_by_hand():
    # ratio - 1 - ln ratio: 2 - 1 - 0.6931472; 0.5 - 1 + 0.6931472; 0
    result, _ = of_ratios(ppo, [[2.0, 0.5, 1.0]], [[1.0, 1.0, 1.0]], **CLIP)
    assert_close(result.approx_kl_BT, torch.tensor([[0.3068528, 0.1931472, 0.0]]), atol=1e-6, rtol=0)


def test_gspo_by_hand():
    # row 1: ratios 2 and 8: the sequence's is 4; A = -1: 4. Row 2: A = 1 and ratio 4, bounded at 1.2: -1.2
    # row 3: one token, ratio 1.1
    ratios = [[2.0, 8.0], [2.0, 8.0], [1.1, 1.0]]
    mask = [[1.0, 1.0], [1.0, 1.0], [1.0, 0.0]]
    result, gradient = of_ratios(gspo, ratios, [[-1.0, -1.0], [1.0, 1.0], [2.0, 2.0]], mask, **CLIP)
    assert_close(result.loss_BT, torch.tensor([[4.0, 4.0], [-1.2, -1.2], [-2.2, 0.0]]))
    assert_close(result.ratio_BT, torch.tensor([[4.0, 4.0], [4.0, 4.0], [1.1, 0.0]]))
    assert result.clipped_BT.tolist() == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    # each of row 1's two losses has the gradient 4 / 2 by each log-prob
    assert_close(gradient, torch.tensor([[4.0, 4.0], [0.0, 0.0], [-2.2, 0.0]]))


def test_gspo_by_sequence_means_is_the_papers_objective():
    # s_1 = 1.05 x 1.1 ^ (1/2) ..., here by the definition, sequence by sequence
    log_prob = torch.tensor([[-1.0, -2.0, -0.5], [-0.3, -0.2, 0.0]], requires_grad=True)
    old = torch.tensor([[-1.1, -2.05, -0.4], [-0.25, -0.5, 0.0]])
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    s_1 = math.exp((0.1 + 0.05 - 0.1) / 3)  # 1.0168063
    s_2 = math.exp((-0.05 + 0.3) / 2)  # 1.1331485, bounded at 1.1 for A = 1
    advantages = torch.tensor([[-2.0] * 3, [1.0] * 3])
    result = gspo(log_prob, old, advantages, mask, clip_ratio_low=0.1, clip_ratio_high=0.1)
    loss = aggregate(
        result.loss_BT, mask, mode="seq-mean-token-mean", n_tokens=5, n_seqs=2, max_response_length=3
    )
    assert s_2 > 1.1
    assert loss.item() == pytest.approx((2 * s_1 - 1.1) / 2, abs=1e-6)
    loss.backward()
    # d s_1 / d log_prob_t = s_1 / 3, times 2 / 2 sequences
    assert_close(log_prob.grad, torch.tensor([[s_1 / 3] * 3, [0.0] * 3]))


def test_cispo_by_hand():
    # old -1, so log_prob = ln ratio - 1; clipped ratios 1.2, 0.8, 1.1
    result, gradient = of_ratios(cispo, [[1.5, 0.5, 1.1]], [[1.0, -2.0, 1.0]], **CLIP)
    # -1.2 x (0.4054651 - 1); 0.8 x 2 x (-0.6931472 - 1); -1.1 x (0.0953102 - 1)
    assert_close(result.loss_BT, torch.tensor([[0.7134419, -2.7090355, 0.9951588]]))
    assert result.clipped_BT.tolist() == [[1.0, 1.0, 0.0]]
    assert_close(result.ratio_BT, torch.tensor([[1.5, 0.5, 1.1]]))
    assert_close(gradient, torch.tensor([[-1.2, 1.6, -1.1]]))  # clipped tokens keep a gradient


def test_cispo_refuses_the_dual_clip():
    with pytest.raises(ConfigError, match=naming("clip_ratio_c=3.0", "cispo")):
        of_ratios(cispo, [[1.0]], [[1.0]], clip_ratio_c=3.0, **CLIP)


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_poisoned_padding_reaches_neither_values_nor_gradients(name, poison):
    mask = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    clean = [
        torch.tensor([[-1.0, 0, -2.0, 0], [0, 0, 0, 0]]),
        torch.tensor([[-1.1, 0, -1.9, 0], [0, 0, 0, 0]]),
        torch.tensor([[1.0, 0, -0.5, 0], [0, 0, 0, 0]]),
    ]
    results = []
    for fill in (0.0, poison):
        log_prob, old, advantages = (column.masked_fill(mask == 0, fill) for column in clean)
        log_prob.requires_grad_()
        result = POLICY_LOSSES[name](log_prob, old, advantages, mask, **CLIP)
        *parts, metrics = result
        assert [part.requires_grad for part in parts] == [True, False, False, False]
        assert not metrics
        results.append([*parts, *torch.autograd.grad(result.loss_BT.sum(), log_prob)])
    for expected, found in zip(*results, strict=True):
        assert torch.equal(found, expected)
        assert found[mask == 0].abs().sum() == 0
    assert results[0][-1][0, 0] != 0


# ---- the critic's


def test_value_loss_by_hand():
    # v = 2, R = 1, v clipped to 0.5: 1 or 0.25; v = 2, R = 3: 1 or 6.25; v = 0.2, R = 1, not clipped: 0.64;
    # v = -2, R = -3, v clipped to -0.5: 1 or 6.25
    values = torch.tensor([[2.0, 2.0, 0.2, -2.0]], requires_grad=True)
    returns, old_values = torch.tensor([[1.0, 3.0, 1.0, -3.0]]), torch.zeros(1, 4)
    result = value_loss(values, returns, old_values, torch.ones(1, 4), cliprange_value=0.5)
    assert_close(result.loss_BT, torch.tensor([[0.5, 3.125, 0.32, 3.125]]))
    assert result.clipped_BT.tolist() == [[0.0, 1.0, 0.0, 1.0]]
    result.loss_BT.sum().backward()
    assert_close(values.grad, torch.tensor([[1.0, 0.0, -0.8, 0.0]]))  # v - R, and 0 where clipped
    assert not result.clipped_BT.requires_grad


def test_the_clip_range_is_around_the_old_value():
    result = value_loss(
        torch.tensor([[5.0]]), torch.tensor([[6.0]]), torch.tensor([[4.0]]), torch.ones(1, 1),
        cliprange_value=0.25,
    )  # fmt: skip
    assert_close(result.loss_BT, torch.tensor([[1.53125]]))  # clipped to 4.25: 1.75^2 / 2


@pytest.mark.parametrize("poison", [NAN, INF])
def test_poisoned_padding_reaches_neither_value_loss_nor_gradient(poison):
    mask = torch.tensor([[1.0, 0.0, 1.0]])
    values = torch.tensor([[1.0, poison, 2.0]], requires_grad=True)
    other = torch.tensor([[0.0, poison, 2.0]])
    result = value_loss(values, other, other, mask, cliprange_value=10.0)
    assert result.loss_BT.tolist() == [[0.5, 0.0, 0.0]]
    result.loss_BT.sum().backward()
    assert values.grad.tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize("function", [ppo, gspo])
def test_a_token_that_is_impossible_before_and_after_has_the_ratio_1(function):
    log_prob = torch.tensor([[-1.0, -INF]], requires_grad=True)
    old = torch.tensor([[-1.0, -INF]])
    result = function(log_prob, old, torch.tensor([[2.0, 2.0]]), torch.ones(1, 2), **CLIP)
    assert_close(result.loss_BT.detach(), torch.tensor([[-2.0, -2.0]]))
    result.loss_BT.sum().backward()
    assert log_prob.grad.tolist() == [[-2.0, 0.0]]
