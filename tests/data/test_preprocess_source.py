from __future__ import annotations

import argparse
import json
import logging

import pyarrow.parquet as pq
import pytest

from strop.cli.prepare import add_arguments, run
from strop.data.prompt_table import read_prompt_table
from strop.data.records import to_rows
from strop.data.sources import read_table
from strop.errors import DataError
from strop.prepare import prepare
from strop.prepare.source import read_source

from messages import mentions, naming


def write(path, records):
    path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("validation.first5000.jsonl", "validation"),
        ("harmless-base.test.jsonl", "test"),
        ("Train.jsonl", "train"),
        ("TEST.JSONL", "test"),
        ("test.jsonl?version=1", "test"),
        ("test-00000-of-00002.jsonl", "test"),
        ("gsm8k.dev.jsonl", "validation"),
        ("train_socratic.jsonl", None),
        ("latest.jsonl", None),
        ("mbpp.jsonl", None),
        ("train.rejected.jsonl", None),
        ("test.txt", None),
    ],
)
def test_a_split_is_the_name_of_its_file_or_a_part_of_it_between_dots(name, split, tmp_path):
    path = write(tmp_path / name, [{}])
    if split is None:
        with pytest.raises(DataError, match=naming("train", "test", "validation")):
            read_source(path)
    else:
        assert set(read_source(path, unnamed_split="other")) == {split}


def test_files_without_a_split_are_one_only_if_no_file_has_one(tmp_path):
    write(tmp_path / "a.jsonl", [{"row": 1}])
    write(tmp_path / "b.jsonl", [{"row": 2}])
    assert read_source(tmp_path, unnamed_split="whole") == {"whole": [{"row": 1}, {"row": 2}]}
    write(tmp_path / "test.jsonl", [{"row": 3}])
    assert read_source(tmp_path, unnamed_split="whole") == {"test": [{"row": 3}]}
    with pytest.raises(DataError, match=naming(".jsonl")):
        read_source(write(tmp_path / "c.txt", [{}]), unnamed_split="whole")


def test_a_misspelt_path_is_no_name_on_the_hub(tmp_path, monkeypatch):
    (tmp_path / "data" / "saved").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ("data/savd", "data/savd:train"):
        with pytest.raises(DataError, match=naming(name, "did you mean data/saved?")):
            read_source(name)


def table(source, out, **options):
    return pq.read_table(prepare("table", source, out, **options)["train"].path).to_pylist()


def test_what_was_prepared_is_not_read_as_the_source(tmp_path):
    rows = [{"prompt": "1+1=", "answer": "2"}]
    source = write(tmp_path / "mine.jsonl", rows)
    assert len(table(tmp_path, tmp_path)) == 1
    for place in (tmp_path, tmp_path / "train.parquet"):
        with pytest.raises(DataError, match=naming(tmp_path / "train.parquet", f"--source {place}", "--out")):
            prepare("table", place, tmp_path)
    assert len(table(source, tmp_path)) == 1
    (tmp_path / "train.parquet").unlink()
    write(tmp_path / "train.jsonl", rows)
    assert len(table(tmp_path, tmp_path)) == 1
    with pytest.raises(DataError, match=naming("train.parquet", "--out")):
        prepare("table", tmp_path, tmp_path)


def test_optional_columns_do_not_make_a_file_another_one(tmp_path):
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4", "hint": "x"}]
    source = write(tmp_path / "train.jsonl", rows)
    first, again = (table(source, tmp_path / "out") for _ in range(2))
    assert first == again
    assert [row["hint"] for row in first] == [None, "x"]
    write(source, [row | {"level": 1} for row in rows])
    with pytest.raises(DataError, match=naming("train.parquet exists", "hint", "level", "another folder")):
        prepare("table", source, tmp_path / "out")


def test_a_table_keeps_the_fields_of_its_records_and_says_what_it_leaves_out(tmp_path, caplog):
    row = {
        "question": "1+1=",
        "prompt": "Calculate.",
        "answer": "2",
        "extra_info": {"index": 17, "level": 3},
        "reward_model": {"ground_truth": "3", "tolerance": 0.5},
    }
    (found,) = table(write(tmp_path / "a.jsonl", [row]), tmp_path / "a", prompt="question")
    assert found == {
        "prompt": [{"role": "user", "content": "1+1="}],
        "answer": "2",
        "reward_model": {"style": "rule", "ground_truth": "2", "tolerance": 0.5},
        "extra_info": {"split": "train", "index": 17, "level": 3},
    }
    assert mentions(caplog.text, "column prompt is left out", "--prompt question")


@pytest.mark.parametrize("answer", [["2", "two"], {"value": 2}])
def test_an_answer_may_be_a_list_or_a_record(answer, tmp_path):
    source = write(tmp_path / "a.jsonl", [{"prompt": "1+1=", "answer": answer}])
    (found,) = table(source, tmp_path / "out")
    assert found["answer"] == found["reward_model"]["ground_truth"] == answer


def test_answers_of_several_types_are_read_as_they_were(tmp_path):
    answers = ["2", ["3", "three"], {"value": 4}]
    rows = [{"prompt": f"{n}+1=", "answer": answer} for n, answer in enumerate(answers)]
    rows[0]["extra_info"] = {"hints": {"first": "count"}}
    rows[1]["extra_info"] = {"hints": {"first": [1]}}
    prepare("table", write(tmp_path / "train.jsonl", rows), tmp_path / "out")
    found = to_rows(read_table(tmp_path / "out" / "train.parquet"))
    assert [row["reward_model"]["ground_truth"] for row in found] == answers
    assert [row["answer"] for row in found] == answers
    assert [row["extra_info"].get("hints") for row in found] == [{"first": "count"}, {"first": [1]}, None]


def test_records_with_an_empty_one_are_kept(tmp_path):
    """Parquet has no empty records, and 1 next to 0.5 is kept as it was written."""
    rows = [{"prompt": "?", "answer": "2", "extra_info": {"score": n, "kwargs": {}}} for n in (1, 0.5)]
    found = table(write(tmp_path / "a.jsonl", rows), tmp_path / "out")
    assert [json.loads(row["extra_info"])["kwargs"] for row in found] == [{}, {}]


@pytest.mark.parametrize(
    ("column", "value"), [("extra_info", "level 3"), ("reward_model", "2"), ("answer", []), ("answer", {})]
)
def test_a_record_that_a_table_cannot_hold_is_named(column, value, tmp_path):
    source = write(tmp_path / "a.jsonl", [{"prompt": "1+1=", "answer": "2", column: value}])
    with pytest.raises(DataError, match=naming("row 0", f"field {column}", repr(value))):
        prepare("table", source, tmp_path / "out")


def test_a_warning_counts_by_reason_and_names_the_first_row(tmp_path, caplog):
    good = {"question": "?", "answer": "#### 1"}
    bad = [{"question": "?", "answer": f"#### {word}"} for word in ("a", "b", "b", "c", "d", "e", "f")]
    with caplog.at_level(logging.WARNING, "strop.data"):
        prepare("gsm8k", write(tmp_path / "train.jsonl", [good, *bad]), tmp_path)
    assert mentions(caplog.text, "7 of 8")
    assert mentions(caplog.text, "2 times", "row 2", "answer")
    assert mentions(caplog.text, "1 other")


WHOLE = {
    "gsm8k": ("gsm8k", {"train": 7473, "test": 1319}),
    "math": ("math_test", {"test": 5000}),
    "hellaswag": ("hellaswag", {"validation": 5000}),
    "humaneval": ("humaneval", {"test": 164}),
    "mbpp": ("mbpp", {"prompt": 10, "test": 500, "validation": 90, "train": 374}),
    "full_hh_rlhf": ("hh_rlhf", {"test": 2299}),
    "arithmetic": (None, {"train": 80, "test": 20}),
}
"""Folder, and rows by split, of the real data sets."""


def test_whole_data_sets_are_prepared_and_read_as_one_list_of_files(real_data, tmp_path):
    files = []
    for name, (folder, rows) in WHOLE.items():
        written = prepare(name, folder and real_data / folder, tmp_path / name)
        assert {split: made.rows for split, made in written.items()} == rows
        assert bool([*(tmp_path / name).glob("*rejected*")]) == (name == "full_hh_rlhf")
        files += [made.path for made in written.values()]
    table = read_prompt_table(files)
    assert len(table) == sum(sum(rows.values()) for _, rows in WHOLE.values())
    schemas = [pq.read_schema(path) for path in files]
    for name in ("data_source", "prompt", "ability", "reward_model"):
        assert {str(schema.field(name).type) for schema in schemas} == {str(schemas[0].field(name).type)}
    assert len(table.table.column("data_source").unique()) == len(WHOLE)
    truths = {table.row(number)["reward_model"]["ground_truth"] for number in range(0, len(table), 1000)}
    assert {type(truth) for truth in truths} == {str}
    gsm8k, math = table.row(0), table.row(7473 + 1319)
    assert gsm8k["reward_model"]["ground_truth"] == "18"  # of the test split
    assert gsm8k["prompt"][0]["content"].endswith('after "####".')
    assert math["reward_model"]["ground_truth"] == "2"
    assert math["prompt"][0]["content"].endswith(r"in \boxed{}.")
    assert (math["data_source"], math["extra_info"]["level"]) == ("lighteval/MATH", "Level 3")


def test_the_command_line_passes_the_kind_on(tmp_path):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    pair = {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"}
    source = str(write(tmp_path / "train.jsonl", [pair]))
    arguments = ["full_hh_rlhf", "--source", source, "--out", str(tmp_path / "out")]
    run(parser.parse_args([*arguments, "--split-kind", "rm"]))
    assert {"chosen", "rejected"} <= set(pq.read_schema(tmp_path / "out" / "train.parquet").names)
    arguments = [*arguments[:-1], str(tmp_path / "rl")]
    run(parser.parse_args(arguments))
    (row,) = pq.read_table(tmp_path / "rl" / "train.parquet").to_pylist()
    assert row["reward_model"]["style"] == "model"
    with pytest.raises(DataError, match=naming("gsm8k", "split_kind")):
        run(parser.parse_args(["gsm8k", *arguments[1:], "--split-kind", "rm"]))
