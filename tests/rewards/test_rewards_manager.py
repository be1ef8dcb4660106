"""Batches whose scores can be computed by hand. One id a character, 0 pads, 1 ends."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rewards_support import WIDTH

from strop.errors import ConfigError, RewardError
from strop.protocol import DataProto
from strop.rewards.arguments import Sample
from strop.rewards.manager import RewardManager
from strop.rewards.reward_output import at_last_token, describe_sample

from messages import mentions, naming

Make = Callable[..., RewardManager]
Batch = Callable[..., DataProto]


def test_the_score_stands_at_the_last_response_token(make: Make, batch_of: Batch):
    output = make()(batch_of(["3", "12", "345 "], ["3", "13", "345"]))
    expected = torch.zeros(3, WIDTH)
    expected[0, 1] = 1.0  # one character and the end token
    expected[2, 4] = 1.0
    assert torch.equal(output.token_level_scores, expected)
    assert output.token_level_scores.dtype == torch.float32
    assert output.parts.keys() == {"rule"}
    assert output.parts["rule"].tolist() == [1.0, 0.0, 1.0]
    assert output.metrics == {
        "reward/error_rate": 0.0,
        "reward/errors": 0.0,
        "reward/timeouts": 0.0,
        "reward/rule/mean": pytest.approx(2 / 3),  # and none by source: they would repeat it
    }
    assert output.responses == ["3", "12", "345 "]
    assert output.errors == ["", "", ""]


def test_the_position_follows_the_mask_also_with_gaps_and_without_a_token():
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]).float()
    scores = at_last_token(torch.tensor([0.5, 2.0, -1.0, 3.0]), mask)
    assert scores.tolist() == [[0, 0, 0, 0.5, 0], [2.0, 0, 0, 0, 0], [0, 0, 0, 0, -1.0], [3.0, 0, 0, 0, 0]]


def test_only_sampled_tokens_are_read_and_no_special_ones(make: Make, batch_of: Batch):
    batch = batch_of(["12345", "7", "8"], ["14", "7", "8"])
    batch.batch["response_mask"][0, 1:3] = 0  # a tool wrote 23
    batch.batch["response_mask"][0, 4:] = 0
    batch.batch["responses"][1, 2:] = 9  # what stands after the end is not the response
    batch.batch["response_mask"][2] = 0
    output = make()(batch)
    assert output.responses == ["14", "7", ""]
    assert output.token_level_scores[0].nonzero().tolist() == [[3]]
    assert output.parts["rule"].tolist() == [1.0, 1.0, 0.0]


def test_the_source_column_and_scorer_options_can_be_set(make: Make, batch_of: Batch):
    batch = batch_of(["it is 3"], ["3"], "something else")
    batch.non_tensor_batch["origin"] = batch_of(["3"], ["3"], "openai/gsm8k").non_tensor_batch["data_source"]
    manager = make(reward_fn_key="origin", scorer_kwargs={"openai/gsm8k": {"method": "flexible"}})
    assert manager(batch).parts["rule"].tolist() == [1.0]


def test_a_custom_function_gets_everything_for_every_source(make: Make, batch_of: Batch):
    def score(data_source, solution_str, ground_truth, extra_info=None):
        return len(data_source) + 10 * len(solution_str) + ground_truth + extra_info["index"]

    output = make(score)(batch_of(["ab", "abc"], [1000, 2000], ["x", "yz"]))
    assert output.parts["rule"].tolist() == [1 + 20 + 1000 + 100, 2 + 30 + 2000 + 101]


def test_parts_of_a_dict_are_kept_and_do_not_change_the_score(make: Make, batch_of: Batch):
    def score(solution_str, **rest):
        return {"score": 1.1, "accuracy": 1.0} if solution_str == "3" else {"score": 0.1, "length": 5}

    output = make(score)(batch_of(["3", "4"], ["3", "3"]))
    assert output.token_level_scores.sum(dim=1).tolist() == pytest.approx([1.1, 0.1])
    assert output.parts["rule"].tolist() == pytest.approx([1.1, 0.1])
    assert output.parts["accuracy"][0] == 1.0
    assert output.parts["length"][1] == 5.0
    assert math.isnan(output.parts["accuracy"][1])
    assert math.isnan(output.parts["length"][0])
    assert output.metrics["reward/accuracy/mean"] == 1.0  # over the samples that have it
    assert output.metrics["reward/length/mean"] == 5.0
    assert output.metrics["reward/rule/mean"] == pytest.approx(0.6)


def test_the_model_score_is_added_and_stands_alone_where_there_is_no_rule(make: Make, batch_of: Batch):
    batch = batch_of(
        ["3", "3", "3"],
        ["3", None, "3"],
        ["strop/arithmetic", "full_hh_rlhf", "strop/arithmetic"],
        ["rule", "model", "model"],
        rm_scores=torch.tensor([0.5, 0.25, -1.5]),
    )
    output = make()(batch)
    assert output.token_level_scores.sum(dim=1).tolist() == [1.5, 0.25, -1.5]
    assert output.parts["reward_model"].tolist() == [0.5, 0.25, -1.5]
    assert output.parts["rule"][0] == 1.0
    assert output.parts["rule"][1:].isnan().all()
    assert output.metrics["reward/rule/mean"] == 1.0
    assert output.metrics["reward/reward_model/mean"] == -0.25
    assert output.metrics["reward/error_rate"] == 0.0


def test_a_batch_for_the_model_alone_starts_no_process(
    make: Make, batch_of: Batch, running: Callable[[], list[int]]
):
    per_token = torch.zeros(1, WIDTH)
    per_token[0, 1] = 0.5  # as verl's workers return it
    for scores in (per_token, torch.tensor([0.5])):
        output = make()(batch_of(["3"], [None], "full_hh_rlhf", "model", rm_scores=scores))
        assert output.parts.keys() == {"reward_model"}
        assert output.token_level_scores.sum().item() == 0.5
    assert running() == []


def test_without_a_model_score_rows_for_the_model_go_to_their_rule(make: Make, batch_of: Batch):
    assert make()(batch_of(["3"], ["3"], style="model")).parts["rule"].tolist() == [1.0]


def test_an_unknown_source_is_an_error_at_the_start_and_before_a_batch_is_scored(
    make: Make, batch_of: Batch, running: Callable[[], list[int]]
):
    manager = make()
    manager.validate_sources(["openai/gsm8k", "lighteval/MATH", "openai/gsm8k"])
    manager.validate_sources(["full_hh_rlhf"], has_reward_model=True)
    make(lambda **sample: 1.0).validate_sources(["anything"])
    with pytest.raises(RewardError, match=naming("'full_hh_rlhf'")):
        manager.validate_sources(["openai/gsm8k", "full_hh_rlhf"])
    with pytest.raises(RewardError, match=naming("'full_hh_rlhf'", "openai/gsm8k")):
        manager(batch_of(["3", "3"], ["3", "3"], ["strop/arithmetic", "full_hh_rlhf"]))
    assert running() == []


def test_a_missing_source_column_names_the_key(make: Make, batch_of: Batch):
    with pytest.raises(RewardError, match=naming("column 'origin'", "data.reward_fn_key", "data_source")):
        make(reward_fn_key="origin")(batch_of(["3"], ["3"]))


def test_missing_optional_columns_are_none_for_the_scorer(make: Make, batch_of: Batch):
    batch = batch_of(["3"], ["3"])
    batch.pop("reward_model", "extra_info")

    def score(ground_truth, extra_info, **rest):
        return float(ground_truth is None and extra_info is None)

    assert make(score)(batch).parts["rule"].tolist() == [1.0]


@pytest.mark.parametrize(
    ("bad", "shown"),
    [
        ("nan", "score=nan"),
        ("inf", "score=inf"),
        ("-inf", "score=-inf"),
        ("1e300", "score=1e+300"),  # infinite in float32
        ({"score": 1.0, "format": "nan"}, "format=nan"),
    ],
)
def test_a_number_that_is_not_finite_is_an_error_of_its_sample(
    make: Make, batch_of: Batch, caplog: pytest.LogCaptureFixture, bad: Any, shown: str
):
    def score(solution_str, **rest):
        if solution_str == "good":
            return {"score": 1.0, "format": 1.0}
        return {name: float(part) for name, part in bad.items()} if isinstance(bad, dict) else float(bad)

    output = make(score, error_score=-0.5)(batch_of(["good", "bad", "good"], ["3"] * 3))
    assert output.token_level_scores.sum(dim=1).tolist() == [1.0, -0.5, 1.0]
    assert output.parts["rule"].tolist() == [1.0, -0.5, 1.0]
    assert output.parts["format"][1].isnan()
    assert mentions(output.errors[1], shown)
    assert output.metrics["reward/errors"] == 1.0
    sample = "sample 1 (data_source='strop/arithmetic', extra_info.index=101, response='bad')"
    assert mentions(caplog.text, shown, sample)
    with pytest.raises(RewardError, match=naming("reward_model.max_error_rate=0.1", sample, shown)):
        make(score)(batch_of(["good", "bad", "bad"], ["3"] * 3))


@pytest.mark.parametrize("mode", ["train", "validate"])
def test_a_model_score_that_is_not_finite_is_an_error_of_its_sample(make: Make, batch_of: Batch, mode: str):
    batch = batch_of(
        ["3", "3", "3", "3"],
        ["3"] * 4,
        ["strop/arithmetic"] * 2 + ["full_hh_rlhf"] * 2,
        rm_scores=torch.tensor([0.5, math.nan, 0.25, -math.inf]),
    )
    batch.meta_info["mode"] = mode
    output = make(error_score=-0.5, max_error_rate=0.5)(batch)
    # In validation the rule alone counts, so the model's NaN beside a rule has no effect.
    expected = {"train": [1.5, -0.5, 0.25, -0.5], "validate": [1.0, 1.0, 0.25, -0.5]}
    assert output.token_level_scores.sum(dim=1).tolist() == expected[mode]
    assert [bool(error) for error in output.errors] == [False, mode == "train", False, True]
    assert mentions(output.errors[3], "the reward model returned -inf")
    assert output.metrics["reward/errors"] == (2.0 if mode == "train" else 1.0)
    assert output.metrics["reward/error_rate"] == (0.5 if mode == "train" else 0.25)
    assert sum(
        value for name, value in output.metrics.items() if name.startswith("reward/added/")
    ) == pytest.approx(sum(expected[mode]) / 4)
    with pytest.raises(RewardError, match=naming("the reward model returned", "max_error_rate=0")):
        make(max_error_rate=0.0)(batch)


def test_a_weighted_sum_that_is_not_finite_is_an_error_of_its_sample(make: Make, batch_of: Batch):
    def score(solution_str, **rest):
        return {"score": 1.0, "other": 3e38 if solution_str == "bad" else 0.5}

    batch = batch_of(["good", "bad"], ["3", "3"], rm_scores=torch.tensor([0.25, 0.25]))
    output = make(score, error_score=-0.5, parts={"other": 10})(batch)
    assert output.token_level_scores.sum(dim=1).tolist() == [1.0 + 5.0 + 0.25, -0.5]
    assert mentions(output.errors[1], "the weighted sum of the parts is inf")


def test_the_error_that_ends_a_run_is_shown_once_with_the_name_of_the_function(
    make: Make, batch_of: Batch, caplog: pytest.LogCaptureFixture
):
    def politeness(solution_str, **rest):
        raise ValueError("no verdict")

    def too_few(completions, **rest):
        return [1.0]

    with pytest.raises(RewardError, match=naming("in politeness", "no verdict")):
        make(politeness)(batch_of(["a", "b", "c"], ["3"] * 3))
    with pytest.raises(RewardError, match=naming("ValueError: too_few (", "returned 1 scores for 3")):
        make(too_few)(batch_of(["a", "b", "c"], ["3"] * 3))
    assert caplog.text == ""


def test_failed_samples_are_counted_logged_and_given_the_error_score(
    make: Make,
    batch_of: Batch,
    caplog: pytest.LogCaptureFixture,
):
    def score(solution_str, **rest):
        if solution_str == "raise":
            raise ValueError("no verdict")
        while solution_str == "hang":
            pass
        return {"score": 1.0, "accuracy": 1.0}

    manager = make(score, timeout_s=1.0, error_score=-0.5, max_error_rate=0.5)
    with caplog.at_level(logging.WARNING):
        output = manager(batch_of(["good", "raise", "hang", "good"], ["3"] * 4))
    assert output.parts["rule"].tolist() == [1.0, -0.5, -0.5, 1.0]
    assert output.token_level_scores.sum(dim=1).tolist() == [1.0, -0.5, -0.5, 1.0]
    assert output.metrics == {
        "reward/error_rate": 0.5,
        "reward/errors": 2.0,
        "reward/timeouts": 1.0,
        "reward/rule/mean": 0.25,
        "reward/accuracy/mean": 1.0,
    }
    assert "ValueError: no verdict" in output.errors[1]
    assert mentions(output.errors[2], "1 s")
    assert output.errors[0] == output.errors[3] == ""
    assert len(caplog.records) == 1  # the first of the batch, with its traceback
    assert "ValueError: no verdict" in caplog.records[0].getMessage()


def test_too_many_failed_samples_stop_with_the_first_traceback(make: Make, batch_of: Batch):
    def score(solution_str, **rest):
        raise ValueError(f"no verdict on {solution_str}")

    parts = ("5 of", "40", "reward_model.max_error_rate=0.1", "sample 0", "ValueError: no verdict on 0")
    with pytest.raises(RewardError, match=naming(*parts)):
        make(score)(batch_of([str(number) for number in range(40)], ["3"] * 40))


def test_failures_of_earlier_batches_count(make: Make, batch_of: Batch):
    manager = make(lambda solution_str, **rest: 1 / (solution_str != "bad"))
    batch = batch_of(["good", "bad", "good"], ["3"] * 3)
    assert manager(batch).metrics["reward/error_rate"] == pytest.approx(1 / 3)
    with pytest.raises(RewardError, match=naming("reward_model.max_error_rate")):
        manager(batch)


def test_examined_samples_are_printed_for_each_source(make: Make, batch_of: Batch):
    shown: list[str] = []
    sources = ["strop/arithmetic"] * 3 + ["openai/gsm8k"]
    manager = make(num_examine=2, printer=shown.append)
    manager(batch_of(["3", "4", "5", "#### 3"], ["3"] * 4, sources))
    assert shown == [
        "[data source] strop/arithmetic\n[prompt] 1+2=\n[response] 3\n[ground truth] 3\n[score] 1, rule 1",
        "[data source] strop/arithmetic\n[prompt] 1+2=\n[response] 4\n[ground truth] 3\n[score] 0, rule 0",
        "[data source] openai/gsm8k\n[prompt] 1+2=\n[response] #### 3\n[ground truth] 3\n[score] 1, rule 1",
    ]


def test_an_examined_sample_shows_the_special_tokens_that_its_text_lacks(make: Make, batch_of: Batch):
    shown: list[str] = []
    batch = batch_of(["3", "4"], ["3"] * 2, ["strop/arithmetic"] * 2)
    batch.batch["hidden_tokens"] = torch.tensor([1, 0])
    batch.batch["responses"][0, 1] = 0
    batch.batch["response_mask"][0, :2] = 1
    make(num_examine=2, printer=shown.append)(batch)
    assert "[response] 3\n[response with special tokens] 3<pad>" in shown[0]
    assert "special tokens" not in shown[1]


def test_a_long_sample_with_special_tokens_is_shown_without_its_middle():
    sample = Sample(data_source="s", solution_str="3", ground_truth="3")
    text = describe_sample(sample, prompt="", score=1, parts={}, error="", whole="3" + "<pad>" * 512)
    assert "3<pad><pad>" in text
    assert "(2161 characters)" in text
    assert len(text) < 700


def test_examined_samples_show_parts_and_errors(make: Make, batch_of: Batch):
    shown: list[str] = []

    def score(solution_str, **rest):
        return {"score": 0.5, "accuracy": 1 / (solution_str != "bad")}

    batch = batch_of(["good", "bad"], ["3", "3"], rm_scores=torch.tensor([0.25, 0.25]))
    batch.pop("prompts")
    make(score, num_examine=5, printer=shown.append)(batch)
    assert "[prompt] (not in the batch)" in shown[0]
    assert "[score] 0.75, rule 0.5, accuracy 1, reward_model 0.25" in shown[0]
    assert "[score] 0.25, rule 0, reward_model 0.25\n[error]\nTraceback" in shown[1]


def test_options_of_built_in_scorers_exclude_a_custom_function(make: Make):
    with pytest.raises(ConfigError, match=naming("scorer_kwargs")):
        make(lambda **sample: 1.0, scorer_kwargs={"openai/gsm8k": {}})
    with pytest.raises(ConfigError, match=naming("<lambda>")):
        make(lambda text, /: 1.0)


def test_a_sample_without_a_score_is_left_out_and_counted(make: Make, batch_of: Batch):
    output = make(lambda solution_str, **rest: {"score": None if solution_str == "bad" else 1.0})(
        batch_of(["good", "bad", "good"], ["3"] * 3)
    )
    assert output.errors == ["", "", ""]
    assert output.parts["rule"].nan_to_num(-9.0).tolist() == [1.0, -9.0, 1.0]
    assert output.metrics["reward/rule/mean"] == 1.0
    assert output.metrics["reward/left_out"] == 1.0


def test_the_first_row_is_scored_where_the_tokenizer_has_no_end_token(tokenizer: Any):
    without = copy.deepcopy(tokenizer)
    without.eos_token = None
    manager = RewardManager(without, 0, lambda response: float(len(response)))
    columns = {"data_source": ["d"], "prompt": ["1+1="], "ground_truth": ["12"]}
    found = manager.score_example(
        DataProto.from_dict(non_tensors=columns), n=1, has_reward_model=False, is_check=True
    )
    manager.close()
    assert found is not None
    assert (found.tried[0].response, found.tried[0].value) == ("12", 2.0)
