from __future__ import annotations

import pickle

import pytest

from strop.errors import ConfigError, RewardError
from strop.rewards.router import Router, default_compute_score
from strop.rewards.score import exact

from messages import naming


@pytest.mark.parametrize(
    ("data_source", "response", "truth"),
    [
        ("openai/gsm8k", "#### 7", "7"),
        ("lighteval/MATH", r"\boxed{7}", "7"),
        ("DigitalLearningGmbH/MATH-lighteval", r"\boxed{7}", "7"),
        ("strop/arithmetic", " 7\n", "7"),
    ],
)
def test_each_data_source_has_a_scorer(data_source: str, response: str, truth: str):
    assert default_compute_score(data_source, response, truth) == 1.0
    assert default_compute_score(data_source, "7 and a half", truth, {"index": 1}) == 0.0


def test_an_unknown_source_names_the_known_and_how_to_give_a_reward():
    known = ("openai/gsm8k", "lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "strop/arithmetic")
    with pytest.raises(
        RewardError,
        match=naming(
            "'openai/gsm9k'",
            *known,
            "custom_reward_function.path",
            "strop docs rewards",
        ),
    ) as error:
        default_compute_score("openai/gsm9k", "#### 7", "7")
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)  # it may come from a worker


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"openai/gsm8k": {"method": "loose"}}, "method='loose'"),
        ({"openai/gsm8k": {"mode": "strict"}}, "unexpected keyword argument 'mode'"),
        ({"openai/gsm9k": {}}, r"'openai/gsm9k' .*openai/gsm8k"),
    ],
)
def test_wrong_options_are_errors_before_the_first_sample(options: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        Router(options)


@pytest.mark.parametrize(
    ("response", "score"), [("7", 1.0), (" 7\n", 1.0), ("7.", 0.0), ("07", 0.0), ("1 7", 0.0), ("", 0.0)]
)
def test_exact_match_ignores_white_space_around_the_answer_only(response: str, score: float):
    assert exact.compute_score(response, 7) == score
    assert exact.compute_score(response, " 7 ") == score
    for nothing in (None, "", " "):
        with pytest.raises(ValueError, match="text"):
            exact.compute_score(response, nothing)
