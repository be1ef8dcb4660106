from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from strop.algorithms.aggregation import (
    AGGREGATION_MODES,
    aggregate,
    log_ratio,
    masked_mean,
    masked_sum,
    masked_var,
    whiten,
    zero_masked,
)
from strop.errors import ConfigError

from messages import naming

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 4.2),  # (1 + 2 + 6 + 4 + 8) / 5
        ("seq-mean-token-sum", 10.5),  # (9 + 12) / 2
        ("seq-mean-token-mean", 4.5),  # (3 + 6) / 2
        ("seq-mean-token-sum-norm", 2.625),  # (9 + 12) / (2 x 4)
    ],
)
def test_the_four_modes_by_hand(mode, expected):
    loss = torch.tensor([[1.0, 2.0, 6.0, NAN], [4.0, INF, 8.0, NAN]])
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 1.0, 0.0]])
    result = aggregate(loss, mask, mode=mode, n_tokens=5, n_seqs=2, max_response_length=4)
    assert result.shape == ()
    assert result.item() == pytest.approx(expected)


@st.composite
def batches(draw):
    n_seqs, length = draw(st.integers(1, 8)), draw(st.integers(1, 6))
    lengths = draw(st.lists(st.integers(0, length), min_size=n_seqs, max_size=n_seqs))
    mask = torch.tensor([[float(t < n) for t in range(length)] for n in lengths], dtype=torch.float64)
    mask[0, 0] = 1
    cell = st.floats(-100, 100, allow_subnormal=False)
    values = draw(
        st.lists(st.lists(cell, min_size=length, max_size=length), min_size=n_seqs, max_size=n_seqs)
    )
    owners = draw(st.lists(st.integers(0, 3), min_size=n_seqs, max_size=n_seqs))
    return torch.tensor(values, dtype=torch.float64), mask, torch.tensor(owners)


@given(batches(), st.sampled_from(AGGREGATION_MODES))
def test_the_parts_of_any_split_add_up_to_the_whole_in_value_and_gradient(batch, mode):
    loss, mask, owners = batch
    whole_counts = {"n_tokens": mask.sum().item(), "n_seqs": len(loss), "max_response_length": loss.shape[1]}
    whole_loss, split_loss = loss.clone().requires_grad_(), loss.clone().requires_grad_()
    whole = aggregate(whole_loss, mask, mode=mode, **whole_counts)
    whole.backward()
    total = 0.0
    for part in range(4):  # a part may have no row at all
        own = owners == part
        share = aggregate(split_loss[own], mask[own], mode=mode, **whole_counts)
        share.backward()
        total += share.item()
    assert total == pytest.approx(whole.item(), rel=1e-9, abs=1e-9)
    assert_close(split_loss.grad, whole_loss.grad)


def test_an_unknown_mode_and_an_empty_denominator_are_refused():
    one = torch.ones(1, 1)
    with pytest.raises(ConfigError, match=r"loss_agg_mode='mean'.*token-mean"):
        aggregate(one, one, mode="mean", n_tokens=1, n_seqs=1, max_response_length=1)
    with pytest.raises(ValueError, match=naming("token-mean", "n_tokens=0")):
        aggregate(one, one, mode="token-mean", n_tokens=0, n_seqs=1, max_response_length=1)


# ---- masked statistics

VALUES = torch.tensor([[1.0, 2.0, NAN], [4.0, INF, 6.0]])
MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]])


def test_sum_and_mean_along_a_dimension():
    assert masked_sum(VALUES, MASK, dim=-1).tolist() == [3.0, 10.0]
    assert masked_mean(VALUES, MASK, dim=-1).tolist() == [1.5, 5.0]
    assert masked_mean(VALUES, MASK, dim=0).tolist() == [2.5, 2.0, 6.0]


def test_whitening_by_hand():
    # mean 13 / 4 = 3.25, variance 14.75 / 3 = 4.9166667, root 2.2173558
    expected = torch.tensor([[-1.0147220, -0.5637345, 0.0], [0.3382407, 0.0, 1.2402158]])
    assert_close(whiten(VALUES, MASK), expected, atol=1e-6, rtol=0)


def test_whitening_adds_1e_8_under_the_root():
    # mean 5e-5, variance 5e-9: 5e-5 / sqrt(1.5e-8) = 0.4082483; with 1e-8 outside of the root, 0.707
    white = whiten(torch.tensor([0.0, 1e-4]), torch.ones(2))
    assert_close(white, torch.tensor([-0.4082483, 0.4082483]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_a_mask_may_have_any_dtype(dtype):
    assert masked_mean(VALUES, MASK.to(dtype)).item() == 3.25
    assert whiten(VALUES, MASK.to(dtype)).dtype == torch.float32


def test_a_mask_broadcasts_and_the_mean_counts_what_it_selects():
    rows = torch.tensor([[1.0], [0.0]])
    assert masked_mean(torch.tensor([[1.0, 2.0], [NAN, NAN]]), rows).item() == 1.5


def test_nothing_selected_gives_zero():
    nothing = torch.zeros_like(MASK)
    assert masked_sum(VALUES, nothing).item() == 0
    assert masked_mean(VALUES, nothing).item() == 0
    assert masked_var(VALUES, nothing).item() == 0
    assert whiten(VALUES, nothing).abs().max().item() == 0
    first_row = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    assert masked_mean(VALUES, first_row, dim=-1).tolist() == [1.5, 0.0]


def test_a_single_value_whitens_to_zero():
    one = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    assert masked_var(VALUES, one).item() == 0
    assert whiten(VALUES, one).abs().max().item() == 0


def test_masked_slots_get_no_gradient_even_through_a_function_that_breaks_there():
    x = torch.tensor([1.0, NAN, INF], requires_grad=True)
    mask = torch.tensor([1.0, 0.0, 0.0])
    zero_masked(zero_masked(x, mask).exp(), mask).sum().backward()
    assert_close(x.grad, torch.tensor([math.e, 0.0, 0.0]))


@given(st.lists(st.tuples(st.floats(-100, 100, width=32), st.booleans()), min_size=2, max_size=20))
def test_statistics_equal_torchs_on_the_selected_values(pairs):
    mask = torch.tensor([selected for _, selected in pairs])
    values = torch.tensor([value if selected else NAN for value, selected in pairs], dtype=torch.float64)
    kept = values[mask]
    assert_close(masked_sum(values, mask), kept.sum())
    if len(kept) > 1:
        assert_close(masked_mean(values, mask), kept.mean())
        assert_close(masked_var(values, mask), kept.var(correction=1))


@pytest.mark.parametrize("value", [1000.1, 0.1, -3.3e5, 1e-3])
@pytest.mark.parametrize("count", [1, 7, 4097])
def test_equal_values_are_whitened_to_0(value, count):
    values = torch.full((count + 1,), value)
    values[-1] = NAN
    mask = torch.ones(count + 1)
    mask[-1] = 0
    whitened = whiten(values, mask)
    assert whitened.dtype == torch.float32
    assert torch.equal(whitened, torch.zeros(count + 1))
    assert masked_var(values, mask) == 0


def test_two_impossible_tokens_have_the_ratio_1_and_no_gradient():
    log_p = torch.tensor([-1.0, -INF, -INF, -2.0, NAN], requires_grad=True)
    log_q = torch.tensor([-3.0, -INF, -2.0, -INF, -INF])
    found = log_ratio(log_p, log_q)
    assert_close(found.detach(), torch.tensor([2.0, 0.0, -INF, INF, NAN]), equal_nan=True)
    found.sum().backward()
    assert log_p.grad.tolist() == [1.0, 0.0, 1.0, 1.0, 1.0]
