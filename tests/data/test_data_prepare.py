from __future__ import annotations

import gzip
import json
import logging
import sys
import types

import pyarrow.parquet as pq
import pytest

from strop.data.sources import read_records, read_table
from strop.errors import DataError, MissingExtraError
from strop.prepare import DATASETS, Prepared, prepare
from strop.prepare.maths import boxed_answer, final_number
from strop.prepare.source import read_source

from messages import mentions, naming


def write_jsonl(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    return path


def gsm(number: int):
    return {"question": f"What is {number}?", "answer": f"It is clear.\n#### {number}"}


def rows_of(path):
    return pq.read_table(path).to_pylist()


def test_a_flipped_bit_in_a_prepared_file_is_found(tmp_path):
    write_jsonl(tmp_path / "raw" / "train.jsonl", [gsm(7), gsm(8)])
    path = prepare("gsm8k", tmp_path / "raw", tmp_path / "out")["train"].path
    content, column = path.read_bytes(), pq.ParquetFile(path).metadata.row_group(0).column(0)
    place = column.dictionary_page_offset + column.total_compressed_size - 1
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    for read in (read_table, lambda path: list(read_records(path))):
        with pytest.raises(DataError, match=naming(str(path), "CRC")):
            read(path)


def test_gsm8k_rows_have_the_schema_of_the_reference(tmp_path):
    write_jsonl(tmp_path / "raw" / "train.jsonl", [gsm(7), gsm(8)])
    result = prepare("gsm8k", tmp_path / "raw", tmp_path / "out", instruction="Answer!")
    assert result == {"train": Prepared(tmp_path / "out" / "train.parquet", 2)}
    assert rows_of(tmp_path / "out" / "train.parquet")[1] == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "What is 8?\nAnswer!"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "8"},
        "extra_info": {
            "split": "train",
            "index": 1,
            "question": "What is 8?",
            "answer": "It is clear.\n#### 8",
        },
    }


@pytest.mark.parametrize(
    ("find", "text", "answer"),
    [
        (final_number, "so\n#### 72", "72"),
        (final_number, "#### 1,234,567", "1234567"),
        (final_number, "#### $80", "80"),
        (final_number, "#### -3", "-3"),
        (final_number, "#### 2.50", "2.50"),
        (final_number, "#### 5.", "5"),
        (final_number, "#### 1\nno:\n#### 2", "2"),
        (final_number, "72", None),
        (final_number, "####", None),
        (final_number, "#### about five", None),
        (final_number, "#### 5 apples", None),
        (boxed_answer, r"$\boxed{5}$", "5"),
        (boxed_answer, r"\boxed{1}, no, \boxed{2}.", "2"),
        (boxed_answer, r"\boxed{\left\{1,2\right\}} and {so} on", r"\left\{1,2\right\}"),
        (boxed_answer, "five", None),
        (boxed_answer, r"\boxed{\frac{1}{2}", None),
        (boxed_answer, r"\boxed{ }", None),
    ],
)
def test_a_solution_ends_in_one_answer(find, text, answer):
    if answer is None:
        with pytest.raises(DataError, match=naming("field")):
            find(text)
    else:
        assert find(text) == answer


def test_records_that_cannot_be_used_are_counted_and_listed(tmp_path, caplog):
    source = write_jsonl(
        tmp_path / "train.jsonl", [gsm(1), {"question": "?", "answer": "none"}, gsm(3), {"q": 1}]
    )
    with caplog.at_level(logging.WARNING, "strop.data"):
        result = prepare("gsm8k", source, tmp_path / "out")
    assert result["train"].rows == 2
    assert mentions(caplog.text, "train", "2 of 4")
    listed = [
        json.loads(line) for line in (tmp_path / "out" / "train.rejected.jsonl").read_text().splitlines()
    ]
    assert listed[0] == {"row": 1, "reason": 'field answer: there is no "####"'}
    assert listed[1]["row"] == 3
    assert mentions(listed[1]["reason"], "question", "None")
    assert [row["extra_info"]["index"] for row in rows_of(result["train"].path)] == [0, 2]

    write_jsonl(source, [gsm(1)])
    prepare("gsm8k", source, tmp_path / "out")
    assert not (tmp_path / "out" / "train.rejected.jsonl").exists()


def test_a_split_without_a_usable_record_is_an_error(tmp_path):
    source = write_jsonl(tmp_path / "train.jsonl", [{"not": "an", "item": 1}])
    with pytest.raises(DataError, match=naming("train", "1 records", "row 0", "question")):
        prepare("gsm8k", source, tmp_path / "out")
    assert not (tmp_path / "out" / "train.parquet").exists()
    empty = write_jsonl(tmp_path / "test.jsonl", [])
    with pytest.raises(DataError, match=naming("test", "0 records")):
        prepare("gsm8k", empty, tmp_path / "out")


def test_sources_may_be_gzip_parquet_shards_or_far_away(tmp_path, memory_fs):
    folder = tmp_path / "raw"
    folder.mkdir()
    (folder / "test.jsonl.gz").write_bytes(gzip.compress(json.dumps(gsm(1)).encode()))
    prepare("arithmetic", None, tmp_path / "made", held_out=0, max_operand=1)
    shard = (tmp_path / "made" / "train.parquet").read_bytes()
    (folder / "train-00001-of-00002.parquet").write_bytes(shard)
    (folder / "train-00000-of-00002.parquet").write_bytes(shard)
    (folder / "val.jsonl").write_text('{"question": "a\u2028b"}\n')  # a line separator of Unicode
    write_jsonl(folder / "train_socratic.jsonl", [gsm(5)])
    (folder / "LICENSE").write_text("MIT")
    found = read_source(folder)
    assert {split: len(records) for split, records in found.items()} == {
        "test": 1,
        "train": 8,
        "validation": 1,
    }
    assert found["test"][0] == gsm(1)
    assert found["validation"] == [{"question": "a\u2028b"}]

    memory_fs.pipe("/gsm/train.jsonl", json.dumps(gsm(9)).encode())
    result = prepare("gsm8k", "memory://gsm", tmp_path / "out", cache_dir=tmp_path / "cache")
    assert rows_of(result["train"].path)[0]["reward_model"]["ground_truth"] == "9"


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("absent", None, ["no such file or folder"]),
        ("answers.jsonl", b"{}", ["answers.jsonl", "train", "test", "validation"]),
        ("train.jsonl", b'{"question": "fine"}\n\n{"question": ', ["train.jsonl", "line 3", "JSON"]),
        ("test.jsonl.gz", b"not gzip", ["test.jsonl.gz"]),
        ("test.parquet", b"not parquet", ["test.parquet"]),
    ],
)
def test_a_source_that_cannot_be_used_is_an_error_that_names_it(tmp_path, name, content, parts):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=naming(*parts)):
        read_source(tmp_path / name)


def test_a_hub_name_goes_to_the_datasets_package(tmp_path, monkeypatch):
    asked = []

    def load_dataset(name, config):
        asked.append((name, config))
        if name == "no/such":
            raise FileNotFoundError("nothing there")
        return {"train": [gsm(4)], "dev": [gsm(5)]}

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.chdir(tmp_path)
    result = prepare("gsm8k", None, tmp_path / "out")
    assert asked == [("openai/gsm8k", "main")]
    assert set(result) == {"train", "validation"}
    with pytest.raises(DataError, match=naming("no/such", "nothing there")):
        read_source("no/such")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"strop\[hub\]"):
        read_source("openai/gsm8k")


def test_arithmetic_holds_pairs_out(tmp_path):
    result = prepare("arithmetic", None, tmp_path, min_operand=3, max_operand=12, held_out=0.1, seed=5)
    assert {split: written.rows for split, written in result.items()} == {"train": 90, "test": 10}
    train, test = (rows_of(tmp_path / f"{split}.parquet") for split in ("train", "test"))
    pairs = [(row["extra_info"]["a"], row["extra_info"]["b"]) for row in train + test]
    assert sorted(pairs) == [(a, b) for a in range(3, 13) for b in range(3, 13)]
    for row in train + test:
        a, b = row["extra_info"]["a"], row["extra_info"]["b"]
        assert row["prompt"] == [{"role": "user", "content": f"{a}+{b}="}]
        assert row["reward_model"] == {"style": "rule", "ground_truth": str(a + b)}
        assert row["data_source"] == "strop/arithmetic"
    assert [row["extra_info"]["index"] for row in test] == list(range(10))


def test_arithmetic_follows_its_seed_and_sizes(tmp_path):
    def prompts(folder, **options):
        result = prepare("arithmetic", None, tmp_path / folder, **options)
        return {
            split: [row["prompt"][0]["content"] for row in rows_of(written.path)]
            for split, written in result.items()
        }

    assert prompts("a", seed=1) == prompts("b", seed=1)
    assert prompts("a", seed=1) != prompts("c", seed=2)
    sized = prompts("d", max_operand=99_999, held_out=7, train_size=20)
    assert (len(sized["train"]), len(sized["test"])) == (20, 7)
    assert set(sized["train"]).isdisjoint(sized["test"])
    asked = prompts("e", held_out=0, max_operand=1, question="What is {a}+{b}?")
    assert asked.keys() == {"train"}
    assert sorted(asked["train"]) == [f"What is {a}+{b}?" for a in (0, 1) for b in (0, 1)]


@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        ("arithmetic", {"min_operand": 5, "max_operand": 4}, ["min_operand=5, max_operand=4"]),
        ("arithmetic", {"min_operand": -1}, ["min_operand=-1"]),
        ("arithmetic", {"held_out": 2.5}, ["held_out=2.5"]),
        ("arithmetic", {"held_out": -0.1}, ["held_out=-0.1"]),
        ("arithmetic", {"held_out": 100}, ["100 held out"]),
        ("arithmetic", {"train_size": 99}, ["99 to train"]),
        ("arithmetic", {"max_operand": 9_999}, ["train_size"]),
        ("arithmetic", {"source": "somewhere"}, ["source"]),
        ("arithmetic", {"question": "What is 1+1?"}, ["{a}", "{b}"]),
        ("gsm9k", {}, ["'gsm9k'", "arithmetic", "full_hh_rlhf", "gsm8k"]),
        ("gsm8k", {"seed": 1}, ["gsm8k", "seed", "instruction", "cache_dir"]),
        *((name, {"nonsense": 1}, [name, "nonsense"]) for name in DATASETS),
    ],
)
def test_unknown_names_and_impossible_options_are_errors(name, options, parts, tmp_path):
    with pytest.raises(DataError, match=naming(*parts)):
        prepare(name, **{"source": None, "out_dir": tmp_path, **options})
