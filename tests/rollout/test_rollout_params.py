"""Sampling parameters and the registry of back-ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from strop.config.backends import ROLLOUTS, RolloutKind
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


def test_temperature_zero_or_do_sample_false_is_greedy():
    assert SamplingParams(max_tokens=1, temperature=0).greedy
    assert SamplingParams(max_tokens=1, do_sample=False).greedy
    assert not SamplingParams(max_tokens=1).greedy


def test_top_k_zero_and_minus_one_are_off():
    assert not SamplingParams(max_tokens=1, top_k=0).filtered
    assert not SamplingParams(max_tokens=1, top_k=-1).filtered
    assert SamplingParams(max_tokens=1, top_k=1).filtered
    assert SamplingParams(max_tokens=1, top_p=0.99).filtered


def test_an_unknown_back_end_names_the_known_ones():
    with pytest.raises(ConfigError, match=naming("rollout.name='sglang'", "hf")):
        build_rollout("sglang", cast(RolloutSpec, None))


def test_a_back_end_is_imported_when_it_is_built_and_shares_weights_where_it_can(monkeypatch):
    kind = RolloutKind(replica="test_rollout_params:Replica", shared="test_rollout_params:Shared")
    monkeypatch.setitem(ROLLOUTS, "mine", kind)
    for model, expected in ((None, Replica), (object(), Shared)):
        spec = cast(RolloutSpec, SimpleNamespace(shared_model=model))
        assert type(build_rollout("mine", spec)).__name__ == expected.__name__


class Replica:
    @classmethod
    def build(cls, spec):
        return cls()


class Shared(Replica):
    pass
