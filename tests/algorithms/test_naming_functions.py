"""Finding estimators and policy losses by name and import path, and giving an estimator what it asks for."""

from __future__ import annotations

import functools

import pytest
import torch

from strop.algorithms import advantages, policy_loss
from strop.algorithms.advantages import ESTIMATORS, estimate, get_estimator, register_estimator
from strop.algorithms.policy_loss import POLICY_LOSSES, extra_inputs, get_policy_loss, register_policy_loss
from strop.algorithms.registry import call, required_parameters
from strop.errors import ConfigError

from messages import naming

OWN_MODULE = """
def centred(rewards, response_mask, scale=2.0):
    return (rewards - rewards.mean()) * scale, rewards

def needs_a_wish(rewards, response_mask, wish):
    return rewards, rewards

def takes_all(rewards, response_mask, **rest):
    return rewards * len(rest), rewards

def one_result(rewards, response_mask):
    return rewards

def wrong_shape(rewards, response_mask):
    return rewards[:, 0], rewards[:, 0]

def my_loss(log_prob, old_log_prob, advantages, response_mask, **clips):
    return None

def wishing_loss(log_prob, wish):
    return None

def loss_of_values(log_prob, values, rollout_log_probs=None, coef=0.1):
    return log_prob, values, rollout_log_probs, coef

number = 3
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_strop_functions.py").write_text(OWN_MODULE)
    (tmp_path / "own_strop_broken.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "own_strop_functions"


@pytest.mark.parametrize("separator", [":", "."])
def test_a_users_own_function_is_found_by_its_import_path(own_module, separator):
    estimator = get_estimator(f"{own_module}{separator}centred")
    assert required_parameters(estimator) == {"rewards", "response_mask"}
    rewards = torch.tensor([[1.0, 3.0]])
    result, _ = estimate(estimator, rewards=rewards, response_mask=torch.ones(1, 2), gamma=1.0, values=None)
    assert result.tolist() == [[-2.0, 2.0]]
    assert get_policy_loss(f"{own_module}{separator}my_loss").__name__ == "my_loss"


def test_an_optional_parameter_is_passed_when_it_is_available(own_module):
    rewards = torch.ones(1, 2)
    everything = {"rewards": rewards, "response_mask": rewards, "gamma": 1.0, "lam": 1.0}
    result, _ = estimate(get_estimator(f"{own_module}:takes_all"), **everything)
    assert result.tolist() == [[2.0, 2.0]]  # gamma and lam


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("grop", ("algorithm.adv_estimator='grop'", "did you mean grpo", "remax")),
        (":fn", ("algorithm.adv_estimator=':fn' is unknown",)),
        ("module:", ("algorithm.adv_estimator='module:' is unknown",)),
        ("module.", ("algorithm.adv_estimator='module.' is unknown",)),
        ("no_such_package:fn", ("No module named 'no_such_package'",)),
        ("no_such_package.fn", ("No module named 'no_such_package'",)),
        ("own_strop_broken:fn", ("'own_strop_broken'", "No module named 'a_package_that_is_not_there'")),
        ("own_strop_functions:missing", ("'own_strop_functions'", "'missing'")),
        ("own_strop_functions:number", ("'own_strop_functions'", "'number'")),
        ("own_strop_functions:needs_a_wish", ("needs_a_wish", " wish,", "baseline_scores, follows, gamma")),
    ],
)
def test_an_estimator_that_cannot_be_used_is_refused(own_module, name, parts):
    with pytest.raises(ConfigError, match=naming(*parts)):
        get_estimator(name)


@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        ("xyz", {}, ("actor.policy_loss='xyz'", "cispo, gspo, ppo")),
        ("own_strop_functions:wishing_loss", {}, ("wishing_loss", " wish,", "advantages")),
        ("own_strop_functions:loss_of_values", {"absent": ["values"]}, ("loss_of_values", " values,")),
        ("own_strop_functions:loss_of_values", {"kwargs": {"cof": 0.5}}, ("policy_loss_kwargs", " cof")),
        ("own_strop_functions:loss_of_values", {"kwargs": {"values": 1}}, ("policy_loss_kwargs", " values")),
    ],
)
def test_a_policy_loss_that_cannot_be_used_is_refused(own_module, name, options, parts):
    with pytest.raises(ConfigError, match=naming(*parts)):
        get_policy_loss(name, **options)


def test_a_policy_loss_takes_columns_and_further_parameters_by_name(own_module):
    name = f"{own_module}:loss_of_values"
    assert extra_inputs(get_policy_loss(name)) == ["rollout_log_probs", "values"]
    assert extra_inputs(get_policy_loss(f"{own_module}:my_loss")) == []
    bound = get_policy_loss(name, {"coef": 0.5})
    assert call(bound, {"log_prob": 2.0, "values": 3.0, "advantages": 1.0}) == (2.0, 3.0, None, 0.5)
    assert get_policy_loss(f"{own_module}:wishing_loss", {"wish": 1}) is not None


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (advantages.gae, ("gae requires values", "gamma, lam, response_mask, rewards")),
        (functools.partial(advantages.grpo, norm_by_std=False), ("grpo requires uid",)),
    ],
)
def test_a_missing_input_is_named(function, parts):
    ones = torch.ones(1, 2)
    available = {"rewards": ones, "response_mask": ones, "gamma": 1.0, "lam": 1.0, "whiten": True}
    with pytest.raises(ConfigError, match=naming(*parts)):
        estimate(function, **available)


@pytest.mark.parametrize("name", ["one_result", "wrong_shape"])
def test_a_result_of_another_form_is_refused(own_module, name):
    ones = torch.ones(2, 2)
    with pytest.raises(ValueError, match=rf"{name} must return two tensors .*\(2, 2\), not \["):
        estimate(get_estimator(f"{own_module}:{name}"), rewards=ones, response_mask=ones)


def test_a_registered_function_is_known_by_name_and_a_name_is_taken_once(monkeypatch):
    monkeypatch.setattr(advantages, "ESTIMATORS", dict(ESTIMATORS))
    monkeypatch.setattr(policy_loss, "POLICY_LOSSES", dict(POLICY_LOSSES))

    @register_estimator("mine")
    def mine(rewards, response_mask):
        return rewards, rewards

    @register_policy_loss("mine")
    def my_loss(
        log_prob, old_log_prob, advantages, response_mask, *, clip_ratio_low, clip_ratio_high, clip_ratio_c
    ):
        return None

    assert get_estimator("mine") is mine
    assert get_policy_loss("mine") is my_loss
    with pytest.raises(ValueError, match="'gae' is already registered"):
        register_estimator("gae")(mine)
    with pytest.raises(ValueError, match="'ppo' is already registered"):
        register_policy_loss("ppo")(my_loss)
