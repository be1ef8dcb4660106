"""Preference losses by hand, and how their settings and inputs are bound."""

from __future__ import annotations

import math

import pytest
import torch

from strop.algorithms.preference import get_preference_loss, needs_reference
from strop.algorithms.registry import call
from strop.config.names import preference_losses
from strop.errors import ConfigError

from messages import naming

SETTINGS = {"beta": None, "label_smoothing": None, "gamma": None}
INPUTS = {
    "chosen_log_prob": [-4.0, -6.0],
    "rejected_log_prob": [-9.0, -2.0],
    "ref_chosen_log_prob": [-5.0, -5.0],
    "ref_rejected_log_prob": [-8.0, -4.0],
    "chosen_length": [2.0, 3.0],
    "rejected_length": [3.0, 1.0],
}
# log-ratios: chosen 1 and -1, rejected -1 and 2; their differences 2 and -3


def log_sigmoid(x: float) -> float:
    return -math.log(1 + math.exp(-x))


def log_odds(log_p: float) -> float:
    return log_p - math.log(1 - math.exp(log_p))


def of(name, **settings):
    loss = get_preference_loss(name, {**SETTINGS, **settings})
    return call(loss, {key: torch.tensor(value, dtype=torch.float64) for key, value in INPUTS.items()})


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("dpo", {}, [-log_sigmoid(0.2), -log_sigmoid(-0.3)]),
        ("dpo", {"beta": 0.5}, [-log_sigmoid(1.0), -log_sigmoid(-1.5)]),
        (
            "dpo",
            {"beta": 0.5, "label_smoothing": 0.25},
            [
                -0.75 * log_sigmoid(1.0) - 0.25 * log_sigmoid(-1.0),
                -0.75 * log_sigmoid(-1.5) - 0.25 * log_sigmoid(1.5),
            ],
        ),
        (
            "cdpo",
            {},
            [
                -0.9 * log_sigmoid(0.2) - 0.1 * log_sigmoid(-0.2),
                -0.9 * log_sigmoid(-0.3) - 0.1 * log_sigmoid(0.3),
            ],
        ),
        # per token: 1/2 + 1/3 and -1/3 - 2; the target is 1 / (2 x 0.25)
        ("ipo", {"beta": 0.25}, [(5 / 6 - 2) ** 2, (-7 / 3 - 2) ** 2]),
        ("hinge", {"beta": 0.5}, [0.0, 2.5]),
        # per token: -2 and -3, -2 and -2
        ("simpo", {}, [-log_sigmoid(2.0 * (-2 + 3) - 1.0), -log_sigmoid(-1.0)]),
        (
            "simpo",
            {"beta": 0.5, "gamma": 0.25},
            [-log_sigmoid(0.5 - 0.25), -log_sigmoid(-0.25)],
        ),
        (
            "orpo",
            {"beta": 0.5},
            [2 - 0.5 * log_sigmoid(log_odds(-2) - log_odds(-3)), 2 - 0.5 * math.log(0.5)],
        ),
    ],
)
def test_losses_by_hand(name, settings, expected):
    assert of(name, **settings).loss_B.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "chosen", "rejected"),
    [
        ("dpo", [0.1, -0.1], [-0.1, 0.2]),
        ("ipo", [0.1, -0.1], [-0.1, 0.2]),
        ("simpo", [-4.0, -4.0], [-6.0, -4.0]),
        ("orpo", [-0.2, -0.2], [-0.3, -0.2]),
    ],
)
def test_rewards_by_hand(name, chosen, rejected):
    found = of(name)
    assert found.chosen_reward_B.tolist() == pytest.approx(chosen)
    assert found.rejected_reward_B.tolist() == pytest.approx(rejected)


def test_orpo_of_a_certain_answer_is_finite():
    inputs = {
        "chosen_log_prob": torch.tensor([0.0, -1.0], requires_grad=True),
        "rejected_log_prob": torch.tensor([-1.0, 0.0], requires_grad=True),
        "chosen_length": torch.ones(2),
        "rejected_length": torch.ones(2),
    }
    loss = call(get_preference_loss("orpo", SETTINGS), inputs).loss_B.sum()
    loss.backward()
    assert loss.isfinite()
    assert all(inputs[name].grad.isfinite().all() for name in ("chosen_log_prob", "rejected_log_prob"))


def test_the_parameters_of_a_loss_decide_whether_there_is_a_reference():
    with_one = {name for name in preference_losses() if needs_reference(get_preference_loss(name, SETTINGS))}
    assert with_one == {"dpo", "cdpo", "ipo", "hinge"}


def own(chosen_log_prob, beta, scale):
    return chosen_log_prob * beta * scale


def with_any(chosen_log_prob, beta, **options):
    return chosen_log_prob * beta * options["scale"]


def no_such_input(chosen_log_prob, values):
    return chosen_log_prob + values


def test_a_loss_of_ones_own_takes_settings_and_further_arguments():
    bound = get_preference_loss(f"{__name__}:own", {**SETTINGS, "beta": 2.0}, {"scale": 3.0})
    assert call(bound, {"chosen_log_prob": torch.tensor([1.0])}).tolist() == [6.0]
    bound = get_preference_loss(f"{__name__}:with_any", {**SETTINGS, "beta": 2.0}, {"scale": 3.0})
    assert call(bound, {"chosen_log_prob": torch.tensor([1.0])}).tolist() == [6.0]


@pytest.mark.parametrize(
    ("name", "kwargs", "parts"),
    [
        ("dop", {}, ["update.loss='dop'", "dpo"]),
        ("dpo", {"scale": 1}, ["update.loss_kwargs", "scale"]),
        ("dpo", {"beta": 1}, ["update.loss_kwargs", "beta"]),
        (f"{__name__}:no_such_input", {}, ["update.loss", "values"]),
        (f"{__name__}:own", {"scale": 1}, ["update.loss", "beta"]),
    ],
)
def test_a_loss_that_cannot_be_used_is_an_error(name, kwargs, parts):
    with pytest.raises(ConfigError, match=naming(*parts)):
        get_preference_loss(name, SETTINGS, kwargs)
