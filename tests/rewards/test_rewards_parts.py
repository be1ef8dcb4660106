"""Scores of several parts, against sums done by hand. One id a character, 0 pads, 1 ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from strop.config.load import load_config
from strop.errors import ConfigError, RewardError
from strop.protocol import DataProto
from strop.rewards.loading import load_reward_manager
from strop.rewards.manager import RewardManager

from messages import mentions, naming

Make = Callable[..., RewardManager]
Batch = Callable[..., DataProto]

GSM8K, MATH, OWN = "openai/gsm8k", "strop/arithmetic", "my/dialogues"


def scores_of(output: Any) -> list[float]:
    return pytest.approx(output.token_level_scores.sum(dim=1).tolist(), nan_ok=True)


def column(output: Any, name: str) -> list[float | None]:
    return [None if math.isnan(value) else round(value, 5) for value in output.parts[name].tolist()]


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """A module ``dashes`` with a scorer, found by this process and by the one that scores."""
    (tmp_path / "dashes.py").write_text(
        "def count(solution_str, times=1.0, **sample):\n    return times * solution_str.count('-')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_score_is_the_weighted_sum_of_its_parts(make: Make, batch_of: Batch, importable: None):
    manager = make(
        parts={
            "rule": {"weight": {GSM8K: 2.0, "*": 1.0}},
            "reward_model": 0.5,
            "dashes": {"weight": {MATH: 0.25}, "scorer": "dashes:count", "kwargs": {"times": 2}},
            "form": {"weight": 0.1, "scorer": "format", "kwargs": {"pattern": "#+.*"}},
        }
    )
    batch = batch_of(
        ["#### 7", "7", "#--", "--"],
        ["7", "7", "x", "y"],
        data_source=[GSM8K, MATH, MATH, OWN],
        style=["rule", "rule", "rule", "model"],
        rm_scores=torch.tensor([1.0, 2.0, -4.0, 3.0]),
    )
    output = manager(batch)
    # gsm8k: 2 x 1 + 0.5 x 1 + 0.1 x 1; 7 = 7: 1 + 0.5 x 2; #--: 0 + 0.5 x -4 + 0.25 x 2 x 2 + 0.1 x 1;
    # and the last one has no rule: 0.5 x 3
    assert scores_of(output) == [2.6, 2.0, -0.9, 1.5]
    assert column(output, "rule") == [1.0, 1.0, 0.0, None]
    assert column(output, "dashes") == [None, 0.0, 4.0, None]
    assert column(output, "form") == [1.0, 0.0, 1.0, 0.0]
    assert column(output, "reward_model") == [1.0, 2.0, -4.0, 3.0]
    assert output.metrics["reward/added/openai/gsm8k/rule"] == pytest.approx(2 / 4)
    assert output.metrics["reward/added/strop/arithmetic/dashes"] == pytest.approx(1 / 4)
    assert output.metrics["reward/score/strop/arithmetic/mean"] == pytest.approx((2.0 - 0.9) / 2)
    assert output.metrics["reward/dashes/mean"] == pytest.approx(2.0)  # before its weight


def test_overlong_responses_are_penalized_by_their_tokens(make: Make, batch_of: Batch, importable: None):
    """Limit 6, buffer 4, as DAPO's equation 13: 0 up to 2 tokens, -1/4 a token, -1 from 6 on."""
    manager = make(
        parts={
            "overlong": {
                "weight": 2.0,
                "scorer": "length",
                "kwargs": {"unit": "tokens", "max_length": 6, "buffer": 4},
            },
            "dashes": {"scorer": "dashes:count"},  # a scorer of the user's is called with the text alone
        }
    )
    texts = ["", "1", "12", "1-3", "12345", "123456"]  # a token a character, and the end
    output = manager(batch_of(texts, ["x"] * 6, data_source=[MATH] * 6))
    assert column(output, "overlong") == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert column(output, "dashes") == [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    assert scores_of(output) == [0.0, 0.0, -0.5, 0.0, -2.0, -2.0]


def test_what_parts_and_sources_add_is_the_mean_score(make: Make, batch_of: Batch, importable: None):
    manager = make(
        parts={"rule": {"weight": {MATH: 3, "*": 1}}, "dashes": {"weight": -0.3, "scorer": "dashes:count"}},
        non_stop_penalty=True,
    )
    sources = [GSM8K, MATH, MATH, GSM8K, MATH]
    truncated = torch.tensor([False, True, False, True, False])
    output = manager(
        batch_of(["#### 1-", "2", "2", "---", "5-"], list("12335"), data_source=sources, truncated=truncated)
    )
    mean = output.token_level_scores.sum(dim=1).mean().item()
    added = {name: value for name, value in output.metrics.items() if name.startswith("reward/added/")}
    assert sum(added.values()) == pytest.approx(mean)
    for source in (GSM8K, MATH):
        own = sum(value for name, value in added.items() if name.startswith(f"reward/added/{source}/"))
        share = sources.count(source) / len(sources)
        assert own == pytest.approx(share * output.metrics[f"reward/score/{source}/mean"])


def test_a_response_that_does_not_stop_has_the_penalty_as_its_whole_score(make: Make, batch_of: Batch):
    manager = make(non_stop_penalty=True, min_response_length=3)
    batch = batch_of(
        ["12", "12", "1", "13"],
        ["12", "12", "1", "12"],
        truncated=torch.tensor([False, True, False, False]),
        rm_scores=torch.tensor([0.5, 0.5, 0.5, 0.5]),
    )
    output = manager(batch)
    assert scores_of(output) == [1.5, -10.0, -10.0, 0.5]  # "1" and its end are two tokens
    assert column(output, "rule") == [1.0, 1.0, 1.0, 0.0]
    assert column(output, "non_stop_penalty") == [None, -11.5, -11.5, None]
    del batch.batch["truncated"]
    with pytest.raises(RewardError, match="truncated"):
        manager(batch)


def test_validation_is_by_the_rule_alone_and_has_no_penalty(make: Make, batch_of: Batch):
    form = {"weight": 5.0, "scorer": "format", "kwargs": {"pattern": "[0-9]+"}}
    manager = make(parts={"rule": 3, "reward_model": 2, "form": form}, non_stop_penalty=True)
    batch = batch_of(
        ["12", "13", "4"],
        ["12", "12", "4"],
        data_source=[MATH, MATH, OWN],
        truncated=torch.tensor([True, False, True]),
        rm_scores=torch.tensor([0.5, 0.5, 0.25]),
    )
    batch.meta_info["mode"] = "validate"
    output = manager(batch)
    assert scores_of(output) == [1.0, 0.0, 0.25]
    assert column(output, "form") == [1.0, 1.0, 1.0]  # kept, but not counted
    assert "non_stop_penalty" not in output.parts


def test_validation_of_a_source_of_other_parts_is_by_these(make: Make, batch_of: Batch):
    manager = make(parts={"rule": {"weight": {"*": 1, OWN: 0}}, "same": {"weight": 2.0, "scorer": "exact"}})
    manager.validate_sources([OWN])
    batch = batch_of(["4", "5"], ["4", "4"], data_source=OWN)
    assert scores_of(manager(batch)) == [2.0, 0.0]
    batch.meta_info["mode"] = "validate"
    assert scores_of(manager(batch)) == [2.0, 0.0]


def test_scores_come_by_source_with_several_sources_or_parts(make: Make, batch_of: Batch):
    def score(solution_str: str, **sample: Any) -> Any:
        return {"score": 1.0, "polite": 4.0}

    def by_source(manager: Any) -> set[str]:
        metrics = manager(batch_of(["1"], ["1"])).metrics
        return {name for name in metrics if name.startswith(("reward/score/", "reward/added/"))}

    assert by_source(make(score)) == set()
    assert by_source(make(score, parts={"polite": 0.5})) == {
        "reward/score/strop/arithmetic/mean",
        "reward/added/strop/arithmetic/rule",
        "reward/added/strop/arithmetic/polite",
    }
    manager = make(score)
    manager.validate_sources([OWN, "another"])  # of which this batch has one only
    assert by_source(manager) == {"reward/score/strop/arithmetic/mean", "reward/added/strop/arithmetic/rule"}


def test_numbers_that_a_function_returns_count_if_they_have_a_weight(make: Make, batch_of: Batch):
    def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Any:
        return {"score": 1.0, "polite": 4.0, "long": 2.0}

    output = make(score, parts={"polite": 0.5})(batch_of(["1"], ["1"]))
    assert scores_of(output) == [3.0]
    assert column(output, "long") == [2.0]
    assert "reward/added/strop/arithmetic/long" not in output.metrics


def test_a_weight_for_a_part_that_the_function_never_returns_is_an_error(make: Make, batch_of: Batch):
    def score(solution_str: str, **sample: Any) -> Any:
        if solution_str == "x":
            raise ValueError("no score")
        return {"score": 1.0, "polite": 4.0} if solution_str == "1" else 1.0

    misspelt = make(score, parts={"polit": 0.5})
    with pytest.raises(RewardError, match=naming("reward_model.parts.polit", "polite")):
        misspelt(batch_of(["1", "2"], ["1", "1"]))
    manager = make(score, parts={"polite": {"weight": {MATH: 0.5}}}, max_error_rate=1.0)
    assert scores_of(manager(batch_of(["2"], ["1"], data_source=OWN))) == [1.0]  # it has no weight there
    assert scores_of(manager(batch_of(["x"], ["1"], data_source=MATH))) == [0.0]  # failed: nothing is known
    assert scores_of(manager(batch_of(["1", "2"], ["1", "1"], data_source=MATH))) == [3.0, 1.0]
    assert scores_of(manager(batch_of(["2"], ["1"], data_source=MATH))) == [1.0]  # it is known to exist


def test_a_weight_for_a_source_that_the_data_lack_is_one_warning(
    make: Make, caplog: pytest.LogCaptureFixture
):
    manager = make(parts={"rule": {"weight": {"openai/gsm8kk": 3, MATH: 2, "*": 1}}})
    for _ in range(2):
        manager.validate_sources([GSM8K])
    (warning,) = [record.getMessage() for record in caplog.records]
    assert mentions(warning, "reward_model.parts.rule.weight", "data_source", "'openai/gsm8kk'")
    assert "openai/gsm8k)" in warning


def test_a_part_that_fails_is_the_samples_failure_and_scores_the_error_score(make: Make, batch_of: Batch):
    manager = make(
        parts={"rule": 4.0, "choice": {"weight": 1.0, "scorer": "choice"}},
        error_score=-1.0,
        max_error_rate=1.0,
    )
    output = manager(batch_of(["1", "2"], ["1", "2"], data_source=MATH))  # 1 and 2 are choices B and C
    assert scores_of(output) == [4.0, 4.0]
    output = manager(batch_of(["answer: 8", "2"], ["8", "2"]))  # there is no ninth choice
    assert scores_of(output) == [-1.0, 4.0]
    assert output.metrics["reward/errors"] == 1.0
    assert column(output, "choice") == [None, 0.0]


def test_a_source_that_no_part_scores_is_an_error_at_start_up(make: Make):
    with pytest.raises(RewardError, match=naming("'my/dialogues'")):
        make(parts={"rule": {"weight": {OWN: 0}}}).validate_sources([OWN])
    weightless = make(parts={"reward_model": {"weight": {GSM8K: 1}}})
    weightless.validate_sources([GSM8K], has_reward_model=True)
    with pytest.raises(RewardError, match=naming("'my/dialogues'")):
        weightless.validate_sources([OWN], has_reward_model=True)


def test_a_built_in_scorer_without_a_weight_does_not_judge(make: Make):
    manager = make(parts={"rule": {"weight": {MATH: 0, "*": 2}}})
    assert [manager.is_built_in(source) for source in (GSM8K, MATH, OWN)] == [True, False, False]
    assert not make(lambda **sample: 1.0).is_built_in(GSM8K)


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"form": {"wieght": 1}}, r"reward_model\.parts\.form\.wieght"),
        ({"form": {"weight": "heavy", "scorer": "format"}}, r"form\.weight: .*'heavy'"),
        ({"form": {"weight": {"a": True}, "scorer": "format"}}, r"form\.weight: .*True .*'a'"),
        ({"form": math.inf}, r"form\.weight: .*inf"),
        ({"rule": {"weight": 1, "scorer": "format"}}, r"parts\.rule: .*weight"),
        ({"non_stop_penalty": -1}, "non_stop_penalty"),
        ({"form": {"kwargs": {"a": 1}}}, r"form\.kwargs"),
        ({"form": {"scorer": "fromat"}}, r"form\.scorer='fromat' .*format"),
        ({"form": {"scorer": "format", "kwargs": {"patern": "a"}}}, r"form\.kwargs: .*patern"),
        ({"form": {"scorer": "math.sqrt"}}, r"form\.scorer='math.sqrt'"),
        ({"a": {"weight": None}, "b": {"sorcer": "x"}}, r"(?s)(?=.*parts\.a\.weight).*parts\.b\.sorcer"),
    ],
)
def test_wrong_parts_are_errors_that_name_all_keys(make: Make, parts: dict[str, Any], problem: str):
    with pytest.raises(ConfigError, match=problem):
        make(parts=parts)


def test_parts_of_the_configuration_are_those_of_the_manager(tokenizer: Any, batch_of: Batch):
    config = load_config(
        [
            "reward_model.parts={rule: {weight: {openai/gsm8k: 2, *: 1}}, form: {scorer: format}}",
            "reward_model.non_stop_penalty=True",
            "reward_model.penalty_reward_value=-3",
        ]
    )
    manager = load_reward_manager(config, tokenizer, 0)
    try:
        truncated = torch.tensor([False, True])
        batch = batch_of(["#### 4", "4"], ["4", "4"], data_source=[GSM8K, MATH], truncated=truncated)
        assert scores_of(manager(batch)) == [2.0, -3.0]
    finally:
        manager.close()
