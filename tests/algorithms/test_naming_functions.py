"""Finding estimators and policy losses by name and import path, and giving an estimator what it asks for."""

from __future__ import annotations

import functools

import pytest
import torch

from strop.algorithms import advantages, policy_loss
from strop.algorithms.advantages import ESTIMATORS, estimate, get_estimator, needs, register_estimator
from strop.algorithms.policy_loss import POLICY_LOSSES, extra_inputs, get_policy_loss, register_policy_loss
from strop.algorithms.registry import call
from strop.errors import ConfigError

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


def test_the_built_in_names():
    assert set(ESTIMATORS) == {
        "gae", "grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo", "remax",
    }  # fmt: skip
    assert set(POLICY_LOSSES) == {"ppo", "gspo", "cispo"}
    assert get_estimator("gae") is advantages.gae
    assert get_policy_loss("cispo") is policy_loss.cispo


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gae", {"rewards", "values", "response_mask", "gamma", "lam", "whiten"}),
        ("grpo", {"rewards", "response_mask", "uid", "norm_by_std"}),
        ("reinforce_plus_plus", {"rewards", "response_mask", "gamma", "whiten"}),
        ("reinforce_plus_plus_baseline", {"rewards", "response_mask", "uid", "whiten"}),
        ("rloo", {"rewards", "response_mask", "uid"}),
        ("remax", {"rewards", "response_mask", "baseline_scores"}),
    ],
)
def test_an_estimator_needs_what_its_parameters_say(name, expected):
    assert needs(get_estimator(name)) == expected


@pytest.mark.parametrize("separator", [":", "."])
def test_a_users_own_function_is_found_by_its_import_path(own_module, separator):
    estimator = get_estimator(f"{own_module}{separator}centred")
    assert needs(estimator) == {"rewards", "response_mask"}
    rewards = torch.tensor([[1.0, 3.0]])
    result, _ = estimate(estimator, rewards=rewards, response_mask=torch.ones(1, 2), gamma=1.0, values=None)
    assert result.tolist() == [[-2.0, 2.0]]
    assert get_policy_loss(f"{own_module}{separator}my_loss").__name__ == "my_loss"


def test_an_optional_parameter_is_passed_when_it_is_available(own_module):
    rewards = torch.ones(1, 2)
    everything = {"rewards": rewards, "response_mask": rewards, "gamma": 1.0, "lam": 1.0}
    result, _ = estimate(get_estimator(f"{own_module}:takes_all"), **everything)
    assert result.tolist() == [[2.0, 2.0]]  # gamma and lam


def test_an_unknown_name_is_refused_with_the_known_and_the_nearest():
    with pytest.raises(
        ConfigError, match=r"algorithm.adv_estimator='grop' is unknown; did you mean 'grpo'.*remax"
    ):
        get_estimator("grop")
    with pytest.raises(ConfigError, match=r"actor.policy_loss='xyz' is unknown \(known: cispo, gspo, ppo"):
        get_policy_loss("xyz")


@pytest.mark.parametrize(
    "path", ["no_such_package_at_all:fn", "no_such_package_at_all.fn", "own_strop_broken:fn"]
)
def test_a_module_that_cannot_be_imported_is_refused(own_module, path):
    with pytest.raises(ConfigError, match=r"cannot be imported \(No module named '(no_such|a)_package"):
        get_estimator(path)


@pytest.mark.parametrize("attribute", ["missing", "number"])
def test_a_module_without_the_function_is_refused(own_module, attribute):
    with pytest.raises(ConfigError, match=f"'{own_module}' has no function '{attribute}'"):
        get_estimator(f"{own_module}:{attribute}")


@pytest.mark.parametrize("name", [":fn", "module:", "module."])
def test_half_an_import_path_is_unknown(name):
    with pytest.raises(ConfigError, match="is unknown"):
        get_estimator(name)


def test_an_estimator_that_asks_for_what_nobody_supplies_is_refused_at_once(own_module):
    with pytest.raises(ConfigError, match=r"needs_a_wish.* wish.*available: baseline_scores, gamma"):
        get_estimator(f"{own_module}:needs_a_wish")


def test_a_policy_loss_requires_known_inputs_that_the_run_computes(own_module):
    with pytest.raises(ConfigError, match=r"wishing_loss.* wish, .*available: advantages"):
        get_policy_loss(f"{own_module}:wishing_loss")
    name = f"{own_module}:loss_of_values"
    assert extra_inputs(get_policy_loss(name)) == ["rollout_log_probs", "values"]
    with pytest.raises(ConfigError, match=r"loss_of_values.* values"):
        get_policy_loss(name, absent=["values"])
    assert extra_inputs(get_policy_loss(f"{own_module}:my_loss")) == []


def test_further_parameters_of_a_policy_loss_are_set_and_checked(own_module):
    name = f"{own_module}:loss_of_values"
    bound = get_policy_loss(name, {"coef": 0.5})
    assert call(bound, {"log_prob": 2.0, "values": 3.0, "advantages": 1.0}) == (2.0, 3.0, None, 0.5)
    assert get_policy_loss(f"{own_module}:wishing_loss", {"wish": 1}) is not None
    with pytest.raises(ConfigError, match=r"policy_loss_kwargs.* cof"):
        get_policy_loss(name, {"cof": 0.5})
    with pytest.raises(ConfigError, match=r"policy_loss_kwargs.* values"):
        get_policy_loss(name, {"values": 0.5})


def test_a_missing_input_is_named():
    ones = torch.ones(1, 2)
    with pytest.raises(
        ConfigError, match=r"gae requires values, .*\(available: gamma, lam, response_mask, rewards"
    ):
        estimate(
            advantages.gae, rewards=ones, response_mask=ones, values=None, gamma=1.0, lam=1.0, whiten=True
        )


def test_a_missing_input_of_a_partial_is_named_too():
    ones = torch.ones(1, 2)
    with pytest.raises(ConfigError, match=r"grpo requires uid"):
        estimate(functools.partial(advantages.grpo, norm_by_std=False), rewards=ones, response_mask=ones)


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
