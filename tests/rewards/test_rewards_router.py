from __future__ import annotations

import pickle

import pytest

from strop.errors import ConfigError, RewardError
from strop.rewards import router
from strop.rewards.router import Router, default_compute_score, register_scorer
from strop.rewards.score import exact


@pytest.fixture
def fresh_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "_registered", {})


def call(router: Router, data_source: str, solution_str: str, ground_truth: object) -> object:
    return router(
        data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=None
    )


@pytest.mark.parametrize(
    ("data_source", "response", "truth"),
    [
        ("openai/gsm8k", "#### 7", "7"),
        ("lighteval/MATH", r"\boxed{7}", "7"),
        ("DigitalLearningGmbH/MATH-lighteval", r"\boxed{7}", "7"),
        ("strop/arithmetic", " 7\n", "7"),
    ],
)
def test_each_data_source_has_its_own_scorer(data_source: str, response: str, truth: str):
    assert default_compute_score(data_source, response, truth) == 1.0
    assert default_compute_score(data_source, "7 and a half", truth, {"index": 1}) == 0.0


def test_an_unknown_source_names_the_known_and_both_ways_to_add_one():
    with pytest.raises(RewardError) as error:
        default_compute_score("openai/gsm9k", "#### 7", "7")
    for word in (
        "'openai/gsm9k'",
        "openai/gsm8k",
        "lighteval/MATH",
        "DigitalLearningGmbH/MATH-lighteval",
        "strop/arithmetic",
        "custom_reward_function.path",
        "register_scorer",
    ):
        assert word in str(error.value)
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)  # it may come from a worker


@pytest.mark.usefixtures("fresh_registry")
def test_a_registered_scorer_gets_all_four_arguments():
    def score(data_source, solution_str, ground_truth, extra_info=None):
        return [data_source, solution_str, ground_truth, extra_info]

    register_scorer("mine", score)
    assert default_compute_score("mine", "a", "b", {"c": 1}) == ["mine", "a", "b", {"c": 1}]


@pytest.mark.usefixtures("fresh_registry")
def test_a_scorer_may_be_registered_by_import_path_and_goes_before_the_built_in_one():
    register_scorer("openai/gsm8k", "strop.rewards.router:default_compute_score")
    assert router.load_backend("strop.rewards.score.exact:compute_score") is exact.compute_score
    register_scorer("openai/gsm8k", lambda **sample: 0.5)
    assert default_compute_score("openai/gsm8k", "#### 7", "7") == 0.5


@pytest.mark.usefixtures("fresh_registry")
def test_a_router_keeps_the_scorers_that_were_known_when_it_was_made():
    before = Router()
    register_scorer("mine", lambda **sample: 1.0)
    assert "mine" not in before.sources
    assert "mine" in Router().sources


def test_registering_something_that_cannot_be_called_so_is_refused():
    with pytest.raises(ConfigError, match=r"register_scorer\('mine'\)"):
        register_scorer("mine", lambda text: 1.0)


def test_options_reach_the_built_in_scorer():
    router = Router({"openai/gsm8k": {"method": "flexible"}})
    assert call(router, "openai/gsm8k", "it is 7", "7") == 1.0
    assert call(Router(), "openai/gsm8k", "it is 7", "7") == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"openai/gsm8k": {"method": "loose"}}, "method='loose'"),
        ({"openai/gsm8k": {"mode": "strict"}}, "unexpected keyword argument 'mode'"),
        ({"openai/gsm9k": {}}, r"'openai/gsm9k' .*openai/gsm8k"),
    ],
)
def test_wrong_options_are_found_before_the_first_sample(options: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        Router(options)


@pytest.mark.parametrize(
    ("response", "score"), [("7", 1.0), (" 7\n", 1.0), ("7.", 0.0), ("07", 0.0), ("1 7", 0.0), ("", 0.0)]
)
def test_exact_match_forgives_white_space_around_the_answer_only(response: str, score: float):
    assert exact.compute_score(response, 7) == score
    assert exact.compute_score(response, " 7 ") == score


def test_exact_match_without_a_ground_truth_is_an_error():
    for truth in (None, "", " "):
        with pytest.raises(ValueError, match="text"):
            exact.compute_score("", truth)
