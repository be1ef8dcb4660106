from __future__ import annotations

import pytest

from strop.data.parquet import read_prompt_table, require_ground_truths
from strop.errors import DataError

from messages import naming


def row(source: str, ground_truth: str | None, style: str = "rule"):
    return {
        "prompt": "w1",
        "data_source": source,
        "reward_model": {"style": style, "ground_truth": ground_truth},
    }


@pytest.fixture
def require(write):
    """require(rows, sources) on one file data.parquet."""

    def check(rows, sources, *, by_model=False, **read):
        table = read_prompt_table(write("data.parquet", rows), **read)
        require_ground_truths(table, "data_source", sources, by_model=by_model)

    return check


def test_the_first_row_without_an_answer_is_named(require):
    rows = [row("a", "1"), row("b", None), row("a", None), row("a", None)]
    with pytest.raises(
        DataError, match=naming("data.parquet", "row 2", "field reward_model.ground_truth", "null")
    ):
        require(rows, {"a"})
    require(rows, {"c"})
    require(rows, set())


def test_rows_that_ask_for_the_reward_model_need_no_answer(require):
    rows = [row("a", None, "model"), row("a", "1")]
    require(rows, {"a"}, by_model=True)
    with pytest.raises(DataError, match=naming("row 0")):
        require(rows, {"a"})
    with pytest.raises(DataError, match=naming("row 1")):
        require([*rows[:1], row("a", None)], {"a"}, by_model=True)


def test_a_missing_column_or_field_is_named(require):
    with pytest.raises(DataError, match=naming("data.parquet", "column 'reward_model'", "'a'")):
        require([{"prompt": "w1", "data_source": "a"}], {"a"})
    with pytest.raises(DataError, match=naming("row 0", "ground_truth", "'style'")):
        require([{"prompt": "w1", "data_source": "a", "reward_model": {"style": "rule"}}], {"a"})
    require([{"prompt": "w1"}], {"a"})


def test_rows_are_found_in_the_file_that_they_came_from(write):
    first, second = (
        write("a.parquet", [row("a", "1")] * 3),
        write("b.parquet", [row("a", None), row("b", "2")]),
    )
    with pytest.raises(DataError, match=naming("b.parquet", "row 0")):
        require_ground_truths(read_prompt_table([first, second]), "data_source", {"a"}, by_model=False)
