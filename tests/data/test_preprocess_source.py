from __future__ import annotations

import json
import logging

import pyarrow.parquet as pq
import pytest

from strop.cli.prepare import add_arguments, prepare_from_arguments
from strop.data.parquet import read_prompt_table
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
        ("test-00000-of-00002.jsonl", "test"),
        ("gsm8k.dev.jsonl", "validation"),
    ],
)
def test_a_split_is_told_by_the_name_or_a_part_of_it_between_dots(name, split, tmp_path):
    assert set(read_source(write(tmp_path / name, [{}]), unnamed_split="other")) == {split}


@pytest.mark.parametrize(
    "name", ["train_socratic.jsonl", "latest.jsonl", "mbpp.jsonl", "train.rejected.jsonl", "test.txt"]
)
def test_other_names_tell_none(name, tmp_path):
    with pytest.raises(DataError, match=naming("train", "test", "validation")):
        read_source(write(tmp_path / name, [{}]))


def test_files_without_a_split_are_one_only_if_no_file_has_one(tmp_path):
    write(tmp_path / "a.jsonl", [{"row": 1}])
    write(tmp_path / "b.jsonl", [{"row": 2}])
    assert read_source(tmp_path, unnamed_split="whole") == {"whole": [{"row": 1}, {"row": 2}]}
    write(tmp_path / "test.jsonl", [{"row": 3}])
    assert read_source(tmp_path, unnamed_split="whole") == {"test": [{"row": 3}]}
    with pytest.raises(DataError, match=naming(".jsonl")):
        read_source(write(tmp_path / "c.txt", [{}]), unnamed_split="whole")


def test_a_warning_counts_by_reason_and_names_the_first_row(tmp_path, caplog):
    good = {"question": "?", "answer": "#### 1"}
    bad = [{"question": "?", "answer": f"#### {word}"} for word in ("a", "b", "b", "c", "d", "e", "f")]
    with caplog.at_level(logging.WARNING, "strop.data"):
        prepare("gsm8k", write(tmp_path / "train.jsonl", [good, *bad]), tmp_path)
    assert mentions(caplog.text, "7 of 8")
    assert mentions(caplog.text, "2 times", "row 2", "answer")
    assert mentions(caplog.text, "1 other")


def test_all_data_sets_stand_in_one_list_of_files(real_data, tmp_path):
    folders = {"gsm8k": "gsm8k", "math": "math_test", "hellaswag": "hellaswag", "humaneval": "humaneval"}
    folders |= {"mbpp": "mbpp", "full_hh_rlhf": "hh_rlhf"}
    files, rows = [], 0
    for name, folder in folders.items():
        written = prepare(name, real_data / folder, tmp_path / name)
        files += [made.path for made in written.values()]
        rows += sum(made.rows for made in written.values())
    made = prepare("arithmetic", None, tmp_path / "arithmetic")
    files += [one.path for one in made.values()]
    table = read_prompt_table(files)
    assert len(table) == rows + 100
    schemas = [pq.read_schema(path) for path in files]
    for name in ("data_source", "prompt", "ability", "reward_model"):
        assert {str(schema.field(name).type) for schema in schemas} == {str(schemas[0].field(name).type)}
    sources = set(table.table.column("data_source").unique().to_pylist())
    assert len(sources) == 7
    for number in range(0, len(table), 1000):
        assert isinstance(table.row(number)["reward_model"]["ground_truth"], str)


def test_the_command_line_passes_the_kind_on(tmp_path):
    import argparse

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    pair = {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"}
    source = str(write(tmp_path / "train.jsonl", [pair]))
    arguments = ["full_hh_rlhf", "--source", source, "--out", str(tmp_path / "out")]
    written = prepare_from_arguments(parser.parse_args([*arguments, "--split-kind", "rm"]))
    assert {"chosen", "rejected"} <= set(pq.read_schema(written["train"].path).names)
    arguments = [*arguments[:-1], str(tmp_path / "rl")]
    written = prepare_from_arguments(parser.parse_args(arguments))
    assert pq.read_table(written["train"].path).to_pylist()[0]["reward_model"]["style"] == "model"
    with pytest.raises(DataError, match=naming("gsm8k", "split_kind")):
        prepare_from_arguments(parser.parse_args(["gsm8k", *arguments[1:], "--split-kind", "rm"]))
