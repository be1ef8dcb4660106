from __future__ import annotations

import pytest
from rewards_support import real_rows

from strop.rewards.score.gsm8k import compute_score, extract_number

from messages import naming


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("6 * 3 = 18\n#### 18", 1.0),
        ("#### 18", 1.0),
        ("####   18", 1.0),
        ("#### 18.", 1.0),
        ("#### $18", 1.0),
        ("#### +18", 1.0),
        ("#### 18 apples", 1.0),
        ("#### 18 square feet", 1.0),
        ("#### 18%", 1.0),
        ("#### 18.0", 1.0),
        ("#### $18.00", 1.0),
        ("#### 18\r\nThat is it.", 1.0),
        ("#### 17\nno, wait\n#### 18", 1.0),  # the last one counts
        ("#### 18\nno, wait\n#### 17", 0.0),
        ("#### 18\nthat is #### all", 0.0),  # also without a number
        ("#### 18\n####", 0.0),
        ("so #### 18 is it.", 0.0),  # only a unit may follow
        ("#### 18 or 19", 0.0),
        ("#### 18 or nineteen", 0.0),
        ("#### 18-19", 0.0),
        ("#### 18 19", 0.0),
        ("#### 18/1", 0.0),
        ("#### 18 + 0", 0.0),
        ("#### 18 thousand", 0.0),
        ("#### 18k", 0.0),
        ("#### 18e3", 0.0),
        ("#### 18:30", 0.0),
        ("#### 18?", 0.0),
        ("#### 18 at most", 0.0),
        ("#### 18\nor 19", 0.0),
        ("#### 18\n19", 0.0),
        ("#### 18" + "\n" * 50_000 + "or 19", 0.0),
        ("#### -18", 0.0),
        ("#### −18", 0.0),
        ("#### –18", 0.0),
        ("#### 18–19", 0.0),
        ("#### - 18", 0.0),
        ("#### 180", 0.0),
        ("#### 018", 0.0),
        ("#### 1,8", 0.0),
        ("#### 18,00", 0.0),
        ("####18", 0.0),  # strict: the format asks for a space
        ("####\n18", 0.0),
        ("### 18", 0.0),
        ("#### **18**", 1.0),
        ("#### **$18 dollars**.", 1.0),
        ("#### `18`", 1.0),
        (r"#### $\boxed{18}$", 1.0),
        ("#### (18)", 1.0),
        ("#### **18 or 19**", 0.0),
        (r"#### \boxed{18} or \boxed{19}", 0.0),
        ("#### **18", 1.0),
        ("#### ~18", 0.0),
        ("#### = 18", 0.0),
        ("The answer is 18", 0.0),
        ("", 0.0),
    ],
)
def test_strict_takes_the_last_marked_number(response: str, score: float):
    assert compute_score(response, "18") == score


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("#### -1,234", "-1234"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### $1,234,567.89.", "1234567.89"),
        ("#### .50", "0.5"),
        ("#### - 5", "-5"),
        ("#### −5", "-5"),
        ("#### –5", "-5"),
        ("#### –$5", "-5"),
        ("#### -0", "0"),
        ("#### 12,", "12"),
        ("#### none", None),
    ],
)
def test_numbers_have_one_notation(response: str, number: str | None):
    assert extract_number(response) == number


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("first 3, then 18", "18"),
        ("it costs $1,200.", "1200"),
        ("10-5", "5"),  # a difference, not minus five
        ("it is -5", "-5"),
        ("it is - 5", "-5"),
        ("it is −5", "-5"),
        ("8 - 5", "5"),
        ("it is –5", "-5"),
        ("10–5", "5"),
        ("a discount of 10%–15%", "15"),
        ("he has so many – 5", "5"),
        ("1,0", "0"),
        ("5.00", "5"),
        ("#### 7 or rather 8", "8"),
        ("none", None),
    ],
)
def test_flexible_takes_the_last_number_anywhere(response: str, number: str | None):
    assert extract_number(response, method="flexible") == number


def test_a_marked_but_wrong_number_gets_the_format_score():
    assert compute_score("#### 17", "18", format_score=0.1, score=2.0) == 0.1
    assert compute_score("#### 18", "18", format_score=0.1, score=2.0) == 2.0
    assert compute_score("17", "18", format_score=0.1, score=2.0) == 0.0


@pytest.mark.parametrize("truth", [18, "18", " 18 ", "$18", "2 * 9 = <<2*9=18>>18\n#### 18"])
def test_ground_truths_may_be_numbers_or_whole_answers(truth: object):
    assert compute_score("#### 18", truth) == 1.0
    assert compute_score("#### 19", truth) == 0.0


@pytest.mark.parametrize("truth", [None, "", "eighteen", "18 apples"])
def test_a_ground_truth_that_is_no_number_is_an_error_and_not_a_score(truth: object):
    with pytest.raises(ValueError, match=naming("ground truth")):
        compute_score("#### 18", truth)


def test_an_unknown_method_is_an_error_that_names_the_known_ones():
    with pytest.raises(ValueError, match=naming("'loose'", "'strict'", "'flexible'")):
        compute_score("#### 18", "18", method="loose")


def test_every_answer_of_the_data_set_scores_1_and_no_other_number_does():
    rows = real_rows("gsm8k", "train.jsonl", "test.jsonl")
    assert len(rows) == 8792
    for row in rows:
        truth = int(row["answer"].split("\n#### ")[1].replace(",", ""))
        assert compute_score(row["answer"], str(truth)) == 1.0, row
        assert compute_score(row["answer"], row["answer"]) == 1.0, row
        assert compute_score(row["answer"], str(truth + 1)) == 0.0, row
        assert compute_score(row["answer"], f"{truth}5") == 0.0, row
