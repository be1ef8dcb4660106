"""Sampling parameters and the registry of back-ends."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest

from strop.errors import ConfigError
from strop.rollout.base import RolloutSpec, SamplingParams, build_rollout

from messages import naming

ROLLOUT = SimpleNamespace(
    temperature=0.7,
    top_k=20,
    top_p=0.9,
    response_length=64,
    ignore_eos=True,
    do_sample=True,
    n=5,
    stop_token_ids=[3, 4],
    val_kwargs=SimpleNamespace(do_sample=False, temperature=0, top_k=-1, top_p=1, n=2),
)


def test_training_and_validation_read_their_own_keys():
    assert SamplingParams.from_config(ROLLOUT) == SamplingParams(
        max_tokens=64, n=5, temperature=0.7, top_k=20, top_p=0.9, stop_token_ids=(3, 4), ignore_eos=True
    )
    assert SamplingParams.from_config(ROLLOUT, validate=True) == SamplingParams(
        max_tokens=64, n=2, temperature=0, do_sample=False, stop_token_ids=(3, 4), ignore_eos=True
    )


def test_greedy_and_filtered_follow_from_the_fields():
    params = partial(SamplingParams, max_tokens=1)
    assert all(params(**fields).greedy for fields in ({"temperature": 0}, {"do_sample": False}))
    assert all(params(**fields).filtered for fields in ({"top_k": 1}, {"top_p": 0.99}))
    plain = [params(**fields) for fields in ({}, {"top_k": 0}, {"top_k": -1})]
    assert not any(found.greedy or found.filtered for found in plain)


def test_an_unknown_back_end_names_the_known_ones():
    with pytest.raises(ConfigError, match=naming("rollout.name='sglang'", "hf")):
        build_rollout("sglang", cast(RolloutSpec, None))
