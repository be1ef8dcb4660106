from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from strop.algorithms.correction import rollout_statistics
from strop.algorithms.kl import (
    KL_KINDS,
    AdaptiveKLController,
    FixedKLController,
    apply_kl_penalty,
    kl_penalty,
    make_kl_controller,
    mean_sequence_kl,
)
from strop.errors import ConfigError, TrainingError

from messages import naming

NAN = math.nan


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("kl", [1.0, -2.0, 0.0]),
        ("k1", [1.0, -2.0, 0.0]),
        ("abs", [1.0, 2.0, 0.0]),
        ("mse", [0.5, 2.0, 0.0]),
        ("k2", [0.5, 2.0, 0.0]),
        ("low_var_kl", [0.3678794, 4.3890561, 0.0]),  # e^-1 - 1 + 1, e^2 - 1 - 2
        ("k3", [0.3678794, 4.3890561, 0.0]),
        ("low_var_kl_clamped", [0.3678794, 4.3890561, 0.0]),
    ],
)
def test_estimates_by_hand(kind, expected):
    log_prob = torch.tensor([-1.0, -3.0, -0.5])
    ref_log_prob = torch.tensor([-2.0, -1.0, -0.5])  # d = 1, -2, 0
    assert_close(kl_penalty(log_prob, ref_log_prob, kind), torch.tensor(expected))


@pytest.mark.parametrize(
    ("kind", "gradient"),
    [("kl", 1.0), ("abs", -1.0), ("mse", -2.0), ("low_var_kl", -6.3890561)],  # 1 - e^2
)
def test_gradients_at_d_of_minus_2(kind, gradient):
    log_prob = torch.tensor([-3.0], requires_grad=True)
    kl_penalty(log_prob, torch.tensor([-1.0]), kind).sum().backward()
    assert log_prob.grad.item() == pytest.approx(gradient)


def test_k3_has_the_gradient_of_its_formula_also_where_tokens_moved_far():
    # 1 - exp(-d): d = -3: 1 - e^3; d = -5: 1 - e^5; d = 15: 1; d = -1000: beyond the clamp of d none
    d = torch.tensor([-3.0, -5.0, 15.0, -1000.0], dtype=torch.float64, requires_grad=True)
    kl = kl_penalty(d, torch.zeros(4), "k3")
    assert kl.tolist() == pytest.approx([16.0855369, 142.4131591, 14.0000003, 485165174.4])
    kl.sum().backward()
    assert d.grad.tolist() == pytest.approx([-19.0855369, -147.4131591, 0.9999997, 0.0])


def test_the_clamped_k3_is_verls():
    # d = -5: 142 -> 10; d = 15: 14 -> 10; d = -1000: without the clamp of d, the gradient would be 0 x inf
    log_prob = torch.tensor([-5.0, 0.0, -1000.0, -1.0], requires_grad=True)
    kl = kl_penalty(log_prob, torch.tensor([0.0, -15.0, 0.0, 0.0]), "low_var_kl_clamped")
    assert kl.tolist() == pytest.approx([10.0, 10.0, 10.0, 0.7182818])
    kl.sum().backward()
    assert log_prob.grad.tolist() == pytest.approx([0.0, 0.0, 0.0, -1.7182818])


@pytest.mark.parametrize("size", [1e-7, 1e-5, 1e-3, 0.1])
def test_k3_keeps_its_digits_in_float32(size):
    d = torch.linspace(-size, size, 10_001)
    found, mask = kl_penalty(d, torch.zeros_like(d), "k3"), torch.ones_like(d)[None]
    exact = (
        (-d.double()).exp() - 1 + d.double() if size > 1e-3 else d.double() ** 2 / 2 * (1 - d.double() / 3)
    )
    rounding = 2**-23 * d.double().abs()  # of expm1: one unit in the last place of d
    assert ((found.double() - exact).abs() <= rounding + 1e-6 * exact).all()
    sampled = rollout_statistics(d[None], torch.zeros_like(d)[None], mask)
    assert sampled.kl == pytest.approx((d.double() ** 2 / 2).mean().item(), rel=0.1)


@pytest.mark.parametrize("kind", sorted(set(KL_KINDS) - {"full"}))
def test_a_mask_keeps_poisoned_padding_out_of_value_and_gradient(kind):
    log_prob = torch.tensor([[-1.0, NAN, -2.0]], requires_grad=True)
    ref_log_prob = torch.tensor([[-2.0, -1.0, -math.inf]])
    kl = kl_penalty(log_prob, ref_log_prob, kind, response_mask=torch.tensor([[1.0, 0.0, 0.0]]))
    assert kl[0, 1:].tolist() == [0.0, 0.0]
    assert kl[0, 0] > 0
    kl.sum().backward()
    assert log_prob.grad[0, 1:].tolist() == [0.0, 0.0]
    assert log_prob.grad[0, 0] != 0


def test_k1_and_k3_average_to_the_full_kl():
    # exact expectation under p over three tokens, no sampling
    p, ref = torch.tensor([0.2, 0.5, 0.3]), torch.tensor([0.4, 0.4, 0.2])
    full = (p * (p / ref).log()).sum()
    for kind in ("k1", "k3"):
        assert_close((p * kl_penalty(p.log(), ref.log(), kind)).sum(), full)


def test_full_kl_and_unknown_kinds_are_refused():
    zero = torch.zeros(1)
    with pytest.raises(ValueError, match="token_log_probs"):
        kl_penalty(zero, zero, "full")
    with pytest.raises(ConfigError, match=r"'k4'.*low_var_kl"):
        kl_penalty(zero, zero, "k4")


def test_the_penalty_is_taken_off_the_scores_of_response_tokens_only():
    scores = torch.tensor([[0.0, 1.0, NAN], [2.0, NAN, NAN]])
    kl = torch.tensor([[0.4, -0.2, NAN], [0.6, math.inf, NAN]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    rewards = apply_kl_penalty(scores, kl, mask, beta=0.5)
    assert_close(rewards, torch.tensor([[-0.2, 1.1, 0.0], [1.7, 0.0, 0.0]]))


def test_mean_sequence_kl_weighs_sequences_equally_and_skips_empty_rows():
    kl = torch.tensor([[1.0, 3.0, NAN], [6.0, NAN, NAN], [NAN, NAN, NAN]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert mean_sequence_kl(kl, mask).item() == 4.0  # (2 + 6) / 2, where the token mean is 10/3


def test_a_fixed_coefficient_stays_and_is_not_restored_from_a_checkpoint():
    controller = make_kl_controller("fixed", kl_coef=0.005)
    controller.update(current_kl=100.0, n_samples=1000)
    controller.load_state_dict({"value": 3.0})
    assert isinstance(controller, FixedKLController)
    assert controller.value == 0.005
    assert controller.state_dict() == {}


def test_the_adaptive_coefficient_by_hand():
    controller = AdaptiveKLController(init_kl_coef=0.2, target_kl=6.0, horizon=100)
    controller.update(current_kl=9.0, n_samples=10)  # 0.5, clipped to 0.2: x 1.02
    assert controller.value == pytest.approx(0.204)
    controller.update(current_kl=5.4, n_samples=10)  # -0.1: x 0.99
    assert controller.value == pytest.approx(0.20196)
    controller.update(current_kl=0.0, n_samples=50)  # -1, clipped to -0.2: x 0.9
    assert controller.value == pytest.approx(0.181764)


def test_the_adaptive_coefficient_survives_a_checkpoint():
    first = make_kl_controller("adaptive", kl_coef=0.2, target_kl=6.0, horizon=100)
    first.update(9.0, 10)
    second = make_kl_controller("adaptive", kl_coef=0.2, target_kl=6.0, horizon=100)
    second.load_state_dict(first.state_dict())
    first.update(3.0, 7)
    second.update(3.0, 7)
    assert second.value == first.value != 0.2


def test_an_adaptive_controller_resumed_from_a_fixed_ones_checkpoint_starts_at_its_own_coefficient():
    controller = AdaptiveKLController(0.2, 6.0, 100)
    controller.load_state_dict(FixedKLController(0.5).state_dict())
    assert controller.value == 0.2


def test_a_horizon_that_could_turn_the_coefficient_negative_is_refused():
    controller = AdaptiveKLController(0.2, 6.0, horizon=10)
    with pytest.raises(ConfigError, match=naming("horizon=10", "50", "10")):
        controller.update(0.0, n_samples=50)
    controller.update(0.0, n_samples=49)
    assert controller.value > 0


def test_broken_numbers_are_refused():
    with pytest.raises(TrainingError, match="nan"):
        AdaptiveKLController(0.2, 6.0, 100).update(NAN, 1)
    with pytest.raises(ConfigError, match=naming("type='linear'", "fixed", "adaptive")):
        make_kl_controller("linear", kl_coef=0.1)
