from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strop.cli.check import data_problems
from strop.config.load import load_config
from strop.data.parquet import read_scoring_columns

from builders import write_prompts
from messages import mentions

ARITHMETIC = "strop/arithmetic"


@pytest.fixture
def problems(tmp_path):
    """problems(change of the rows, *overrides): of training files; the validation files are well."""
    validation = write_prompts(tmp_path / "val.parquet", 4)
    rows = pq.read_table(write_prompts(tmp_path / "train.parquet", 12)).to_pylist()

    def find(change=lambda row: row, *overrides, files=None):
        pq.write_table(pa.Table.from_pylist([change(row) for row in rows]), tmp_path / "changed.parquet")
        files = files or f"data.train_files={tmp_path}/changed.parquet"
        return data_problems(load_config([f"data.val_files={validation}", files, *overrides]))

    return find


def without(column):
    return lambda row: {name: value for name, value in row.items() if name != column}


def with_value(column, value, *, index=7):
    return lambda row: {**row, column: value} if row["extra_info"]["index"] == index else row


def unanswered(style="rule"):
    return with_value("reward_model", {"style": style, "ground_truth": None})


def test_good_files_have_none_and_their_answers_stay_unread(problems, tmp_path):
    assert problems() == []
    table = read_scoring_columns(
        tmp_path / "changed.parquet", prompt_key="prompt", reward_fn_key="data_source"
    )
    assert table.table.column_names == ["data_source"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without("prompt"), "'prompt' (data.prompt_key)"),
        (without("data_source"), "'data_source' (data.reward_fn_key)"),
        (without("reward_model"), "'reward_model'"),
        (with_value("data_source", "no/such"), "'no/such'"),
        (with_value("data_source", None), "row 7, field data_source"),
        (unanswered(), "changed.parquet, row 7, field reward_model.ground_truth"),
        (with_value("reward_model", None), "row 7, field reward_model"),
        (lambda row: {**row, "extra_info": {"index": 1}, "uid": "1"}, "'uid'"),
        (lambda row: {**row, "data_source": 3}, "row 0, field data_source"),
    ],
)
def test_what_a_run_would_stop_at_is_one_line(problems, change, said):
    (line,) = problems(change)
    assert said in line


def test_validation_files_are_looked_at_too_and_one_file_is_told_of_once(problems, tmp_path):
    (tmp_path / "empty.parquet").touch()
    (line,) = problems(files=f"data.val_files={tmp_path}/empty.parquet")
    assert mentions(line, "empty.parquet")
    (line,) = problems(without("prompt"), f"data.val_files={tmp_path}/changed.parquet")
    assert "prompt" in line
    assert problems(without("prompt"), "trainer.val_only=True") == []


def test_a_function_of_ones_own_needs_neither_sources_nor_answers(problems):
    own = "custom_reward_function.path=reward.py"
    for change in (without("data_source"), without("reward_model"), unanswered()):
        assert problems(change, own) == []
    assert problems(without("data_source"), "reward_model.reward_manager=my.module:Manager") == []


def test_a_reward_model_scores_what_no_rule_does(problems):
    model = "reward_model.enable=True"
    assert problems(without("data_source"), model) == []
    assert problems(lambda row: {**row, "data_source": "no/such"}, model) == []
    assert problems(unanswered("model"), model) == []
    (line,) = problems(unanswered("rule"), model)
    assert "row 7" in line
    (line,) = problems(unanswered("model"))
    assert "row 7" in line


def test_a_library_of_the_users_may_know_further_sources(problems):
    library = "actor_rollout_ref.model.external_lib=mine"
    assert problems(with_value("data_source", "no/such"), library) == []


def test_a_rule_without_a_weight_needs_no_answer(problems):
    parts = "reward_model.parts={rule: {weight: {strop/arithmetic: 0}}, short: {scorer: length}}"
    assert problems(unanswered(), parts) == []
    (line,) = problems(unanswered(), f"reward_model.parts={{rule: {{weight: {{{ARITHMETIC}: 0}}}}}}")
    assert mentions(line, "reward_model.parts", "weight")


def test_a_file_without_a_column_that_the_other_has_is_named(problems, tmp_path):
    files = f"data.train_files=[{tmp_path}/train.parquet,{tmp_path}/changed.parquet]"
    for column in ("data_source", "reward_model"):
        (line,) = problems(without(column), files=files)
        assert mentions(line, "changed.parquet", f"column {column!r}")
