from __future__ import annotations

import math

import pytest

from strop.data.prompt_table import read_prompt_table, require_ground_truths
from strop.errors import DataError

from messages import naming


def row(source: str, ground_truth: str | float | None, style: str = "rule"):
    return {
        "prompt": "w1",
        "data_source": source,
        "reward_model": {"style": style, "ground_truth": ground_truth},
    }


RULE, ANOTHER, MODEL = row("a", None), row("b", None), row("a", None, "model")


@pytest.mark.parametrize(
    ("rows", "sources", "by_model", "parts"),
    [
        ([row("a", "1"), ANOTHER, RULE, RULE], {"a"}, False, ["row 2", "reward_model.ground_truth", "null"]),
        ([row("a", 1.0), row("a", math.nan)], {"a"}, False, ["row 1", "reward_model.ground_truth", "NaN"]),
        ([row("a", "1"), ANOTHER, RULE, RULE], {"c"}, False, None),
        ([RULE], set(), False, None),
        ([MODEL, row("a", "1")], {"a"}, True, None),  # the reward model needs no answer
        ([MODEL, row("a", "1")], {"a"}, False, ["row 0"]),
        ([MODEL, RULE], {"a"}, True, ["row 1"]),
        ([{"prompt": "w1", "data_source": "a"}], {"a"}, False, ["column 'reward_model'", "'a'"]),
        (
            [{"prompt": "w1", "data_source": "a", "reward_model": {"style": "rule"}}],
            {"a"},
            False,
            ["row 0", "ground_truth", "'style'"],
        ),
        ([{"prompt": "w1"}], {"a"}, False, None),
    ],
)
def test_the_first_row_without_an_answer_that_a_rule_needs_is_named(write, rows, sources, by_model, parts):
    table = read_prompt_table(write("data.parquet", rows))
    if parts is None:
        require_ground_truths(table, "data_source", sources, by_model=by_model)
    else:
        with pytest.raises(DataError, match=naming("data.parquet", *parts)):
            require_ground_truths(table, "data_source", sources, by_model=by_model)


def test_rows_are_found_in_the_file_that_they_came_from(write):
    first, second = (
        write("a.parquet", [row("a", "1")] * 3),
        write("b.parquet", [row("a", None), row("b", "2")]),
    )
    with pytest.raises(DataError, match=naming("b.parquet", "row 0")):
        require_ground_truths(read_prompt_table([first, second]), "data_source", {"a"}, by_model=False)
