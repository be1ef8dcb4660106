"""Statistics of n samples a prompt, against enumeration of all draws and values worked out by hand."""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations

import numpy as np
import pyarrow as pa
import pytest

from strop.rewards.score.answers import answer_extractor
from strop.trainer.sample_statistics import (
    bootstrap_intervals,
    expected_best,
    expected_majority,
    expected_worst,
    sample_counts,
)
from strop.trainer.validation import BestValidation, make_report

from messages import mentions


def draws(n, k):
    return list(combinations(range(n), k))


def winner(scores, answers, drawn):
    """The expected score of the vote among ``drawn``: counted, as one would by hand."""
    by_answer = defaultdict(list)
    for sample, answer in enumerate(answers):
        by_answer[answer].append(scores[sample])
    cast = [answers[sample] for sample in drawn if answers[sample] is not None]
    if not cast:
        return float(np.mean(by_answer[None]))
    most = max(cast.count(answer) for answer in cast)
    winners = {answer for answer in cast if cast.count(answer) == most}
    return float(np.mean([np.mean(by_answer[answer]) for answer in winners]))


@pytest.mark.parametrize("k", range(1, 7))
def test_best_worst_and_majority_are_means_over_all_draws(k):
    rng = np.random.default_rng(k)
    scores = np.concatenate([rng.normal(size=(4, 6)), rng.integers(0, 2, size=(4, 6))])
    answers = rng.choice(np.array(["4", "5", "six", None], dtype=object), size=(8, 6))
    answers[0], answers[1] = None, "4"
    best, worst = expected_best(scores, k), expected_worst(scores, k)
    majority = expected_majority(scores, answers.tolist(), k, seed=k, draws=4000)
    for row in range(8):
        drawn = [scores[row][list(rows)] for rows in draws(6, k)]
        assert best[row] == pytest.approx(np.mean([values.max() for values in drawn]), abs=1e-12)
        assert worst[row] == pytest.approx(np.mean([values.min() for values in drawn]), abs=1e-12)
        voted = [winner(scores[row], answers[row].tolist(), rows) for rows in draws(6, k)]
        assert majority[row] == pytest.approx(np.mean(voted), abs=4 * np.std(voted) / 60 + 1e-12)


def test_best_of_right_and_wrong_answers_is_pass_at_k():
    """c of 5 right: pass@2 = 1 - C(5-c, 2)/C(5, 2), so 0, 4/10, 7/10, 9/10, 1, 1."""
    scores = np.tril(np.ones((6, 5)), -1)
    assert expected_best(scores, 2) == pytest.approx([0.0, 0.4, 0.7, 0.9, 1.0, 1.0])
    assert expected_worst(scores, 2) == pytest.approx([0.0, 0.0, 0.1, 0.3, 0.6, 1.0])


def test_majority_by_hand():
    def majority(answers, k=6):
        return expected_majority(np.array([[1.0, 1, 0, 0, 0, 0]]), [answers], k, seed=1)

    assert majority(["7", "7", "1", "2", "3", "4"]) == [1.0]  # two against one each
    assert majority(["7", "7", "1", "1", "2", "3"]) == [0.5]  # a tie
    assert majority(["7", "7", None, None, None, None]) == [1.0]  # silence is no vote
    assert majority(["7", "7", "1", "2", "3", "4"], 1) == pytest.approx([1 / 3], abs=0.05)
    # Of two drawn: C(2,2) = 1 pair agrees on 7, 8 of 15 pairs tie 7 with a wrong one: (1 + 8/2) / 15.
    assert majority(["7", "7", "1", "2", "3", "4"], 2) == pytest.approx([5 / 15], abs=0.05)
    assert majority(["7", "7", "1", "2", "3", "4"], 2) == majority(["7", "7", "1", "2", "3", "4"], 2)


@pytest.mark.parametrize(
    ("n", "counts"), [(1, []), (2, [2]), (3, [2, 3]), (6, [2, 4, 6]), (8, [2, 4, 8]), (9, [2, 4, 8, 9])]
)
def test_sample_counts_are_powers_of_two_and_n(n, counts):
    assert sample_counts(n) == counts


def test_an_interval_is_that_of_the_normal_approximation_for_many_prompts():
    rng = np.random.default_rng(5)
    values = np.stack([rng.normal(2.0, 3.0, size=900), rng.integers(0, 2, size=900)])
    intervals = bootstrap_intervals(values, seed=1, resamples=4000)
    for values_P, (low, high) in zip(values, intervals, strict=True):
        half = 1.96 * values_P.std() / 30
        assert low == pytest.approx(values_P.mean() - half, abs=0.1 * half)
        assert high == pytest.approx(values_P.mean() + half, abs=0.1 * half)


def test_an_interval_of_three_prompts_is_that_of_all_27_resamples():
    """Means of 0, 0, 3 drawn thrice: 0, 1, 2, 3 in 8, 12, 6 and 1 of 27: the 2.5 % points are 0 and 3."""
    assert bootstrap_intervals(np.array([[0.0, 0.0, 3.0]]), seed=1).tolist() == [[0.0, 3.0]]
    assert bootstrap_intervals(np.array([[2.0]]), seed=1).tolist() == [[2.0, 2.0]]


def test_intervals_are_the_same_every_time_and_do_not_depend_on_the_pieces(monkeypatch):
    values = np.random.default_rng(0).normal(size=(2, 50))
    whole = bootstrap_intervals(values, seed=3)
    assert (whole == bootstrap_intervals(values, seed=3)).all()
    assert (whole != bootstrap_intervals(values, seed=4)).any()
    monkeypatch.setattr("strop.trainer.sample_statistics._INDICES_AT_ONCE", 700)
    assert (whole == bootstrap_intervals(values, seed=3)).all()


@pytest.mark.parametrize(
    ("source", "options", "responses"),
    [
        ("openai/gsm8k", {}, {"so #### 1,200": "1200", "#### $1200.": "1200", "it is 1200": None}),
        ("openai/gsm8k", {"method": "flexible"}, {"it is 1,200 in all": "1200", "none": None}),
        (
            "lighteval/MATH",
            {},
            {r"\boxed{0.5}": r"\frac{1}{2}", r"\boxed{\dfrac12}": r"\frac{1}{2}", "5": None},
        ),
        ("Rowan/hellaswag", {}, {"The answer is (B).": "B", "B": "B", "A or B": None}),
        ("Rowan/hellaswag", {"labels": "1234"}, {"Answer: 3": "3", "Answer: B": None}),
        ("strop/arithmetic", {}, {" 7 ": "7", " ": None}),
    ],
)
def test_answers_that_the_scorer_counts_as_one_are_one_vote(source, options, responses):
    extract = answer_extractor(source, options)
    assert {response: extract(response) for response in responses} == responses


def test_sources_that_compare_no_answers_have_no_vote():
    assert answer_extractor("openai/openai_humaneval") is None
    assert answer_extractor("someone/elses") is None


def test_a_shown_sample_has_the_special_tokens_that_its_scored_text_lacks():
    samples = pa.table(
        {
            "data_source": ["x", "x"],
            "prompt": ["1+2=", "3+4="],
            "response": ["3", "7"],
            "response_with_special_tokens": ["3<pad><pad>", None],
            "hidden_tokens": [2, 0],
            "response_length": [3, 1],
            "score": [1.0, 0.0],
            "truncated": [True, False],
        }
    )
    report = make_report(samples, n=1, extractor_of=lambda source: None, seed=0, show=2)
    assert [sample.response for sample in report.shown] == ["3<pad><pad>", "7"]
    assert report.metrics() == {"val/test_score/x": 0.5, "val/hidden_tokens/x": 1.0}


def report(scores):
    samples = pa.table(
        {
            "data_source": ["own"] * len(scores),
            "score": scores,
            "response": [""] * len(scores),
            "response_length": [1] * len(scores),
            "truncated": [False] * len(scores),
        }
    )
    return make_report(samples, n=1, extractor_of=lambda source: None, seed=0)


def test_a_model_that_was_better_before_is_named_with_its_checkpoint_or_how_to_keep_one(tmp_path):
    worse, better = report([0.0] * 30 + [1.0] * 10), report([0.0] * 10 + [1.0] * 30)
    best = BestValidation()
    assert [best.add(2, worse), best.add(4, better)] == [0.25, 0.75]
    assert best.if_later_ones_are_worse(tmp_path) is None  # the last is the best
    assert best.add(6, report([0.0] * 11 + [1.0] * 29)) == 0.75
    assert best.if_later_ones_are_worse(tmp_path) is None  # one answer fewer, of 40
    best.add(8, worse)
    line = best.if_later_ones_are_worse(tmp_path)
    assert mentions(line, "step 4, had 0.750", "step 8, 0.250", "not kept", "trainer.save_freq")
    resumed = BestValidation(best.score, best.step)
    assert resumed.if_later_ones_are_worse(tmp_path) is None  # nothing was validated since
    resumed.add(10, worse)
    start = BestValidation(0.75, 0)
    start.add(10, worse)
    assert mentions(start.if_later_ones_are_worse(tmp_path), "step 0", "the model that training began with")
    (tmp_path / "global_step_4").mkdir()
    assert str(tmp_path / "global_step_4") in resumed.if_later_ones_are_worse(tmp_path)


def test_prompts_that_nothing_judges_are_not_in_the_mean():
    samples = pa.table(
        {
            "data_source": ["math"] * 4,
            "score": [1.0, 0.0, 0.0, 0.0],
            "reward/rule": [1.0, 0.0, None, None],
            "reward_failed": [False] * 4,
            "response": [""] * 4,
            "response_length": [1] * 4,
            "truncated": [False] * 4,
        }
    )
    found = make_report(samples, n=2, extractor_of=lambda source: None, seed=0).sources["math"]
    assert (found.prompts, found.scores["mean@2"].value) == (1, 0.5)
