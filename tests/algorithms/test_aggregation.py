from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from strop.algorithms.aggregation import AGGREGATION_MODES, aggregate
from strop.errors import ConfigError

from messages import naming

NAN = math.nan


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
    loss = torch.tensor([[1.0, 2.0, 6.0, NAN], [4.0, math.inf, 8.0, NAN]])
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
