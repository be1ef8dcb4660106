from __future__ import annotations

import pickle

import pytest

from strop.errors import ConfigError, RewardError
from strop.rewards import router
from strop.rewards.router import Router, default_compute_score, register_scorer
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


def test_registered_scorers_get_all_four_arguments_and_go_before_built_in_ones(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(router, "_registered", {})
    before = Router()
    register_scorer("mine", lambda **sample: list(sample.values()))
    assert default_compute_score("mine", "a", "b", {"c": 1}) == ["mine", "a", "b", {"c": 1}]
    register_scorer("openai/gsm8k", "builtins:dict")
    sample = {"data_source": "openai/gsm8k", "solution_str": "a", "ground_truth": "b", "extra_info": None}
    assert default_compute_score("openai/gsm8k", "a", "b") == sample
    assert "mine" not in before.sources
    with pytest.raises(ConfigError, match=naming("register_scorer('mine')")):
        register_scorer("mine", lambda text, /: 1.0)
    with pytest.raises(ConfigError, match=naming("batch")):
        register_scorer("mine", lambda completions: [1.0])


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
