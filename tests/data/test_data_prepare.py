from __future__ import annotations

import argparse
import gzip
import json
import logging
import subprocess
import sys
import types

import pyarrow.parquet as pq
import pytest

from strop.cli.prepare import add_arguments, prepare_from_arguments
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


def test_gsm8k_whole(real_data, tmp_path):
    result = prepare("gsm8k", real_data / "gsm8k", tmp_path)
    assert {split: written.rows for split, written in result.items()} == {"train": 7473, "test": 1319}
    assert list(tmp_path.glob("*rejected*")) == []
    first = rows_of(tmp_path / "train.parquet")[0]
    assert first["reward_model"]["ground_truth"] == "72"
    assert first["prompt"][0]["content"].endswith('after "####".')


def test_math_whole(real_data, tmp_path):
    result = prepare("math", real_data / "math_test", tmp_path)
    assert {split: written.rows for split, written in result.items()} == {"test": 5000}
    rows = rows_of(tmp_path / "test.parquet")
    assert [row["reward_model"]["ground_truth"] for row in rows[:4]] == ["2", "10", r"\dfrac{9}{7}", "i"]
    assert rows[0]["data_source"] == "lighteval/MATH"
    assert rows[0]["extra_info"]["level"] == "Level 3"
    assert rows[0]["prompt"][0]["content"].endswith(r"in \boxed{}.")


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("so\n#### 72", "72"),
        ("#### 1,234,567", "1234567"),
        ("#### $80", "80"),
        ("#### -3", "-3"),
        ("#### 2.50", "2.50"),
        ("#### 5.", "5"),
        ("#### 1\nno:\n#### 2", "2"),
    ],
)
def test_the_final_number_is_cleaned(answer, number):
    assert final_number(answer) == number


@pytest.mark.parametrize("answer", ["72", "####", "#### about five", "#### 5 apples"])
def test_an_answer_without_a_number_is_refused(answer):
    with pytest.raises(DataError, match=naming("answer")):
        final_number(answer)


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"$\boxed{5}$", "5"),
        (r"\boxed{1}, no, \boxed{2}.", "2"),
        (r"\boxed{\frac{1}{2^{n}}} and {so} on", r"\frac{1}{2^{n}}"),
        (r"\boxed{\left\{1,2\right\}}", r"\left\{1,2\right\}"),
        (r"\boxed{\}}", r"\}"),
        (r"$\boxed 7$ is it", "7"),
        (r"\boxed{1} or \fbox{2}", "2"),
        (r"\boxed {3}", "3"),
    ],
)
def test_the_last_boxed_answer_is_found(solution, answer):
    assert boxed_answer(solution) == answer


@pytest.mark.parametrize("solution", ["five", r"\boxed{\frac{1}{2}", r"\boxed{ }"])
def test_a_solution_without_an_answer_is_refused(solution):
    with pytest.raises(DataError, match=naming("field solution", "boxed")):
        boxed_answer(solution)


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
    write_jsonl(folder / "train_socratic.jsonl", [gsm(5)])
    write_jsonl(folder / "val.jsonl", [gsm(6)])
    (folder / "LICENSE").write_text("MIT")
    found = read_source(folder)
    assert {split: len(records) for split, records in found.items()} == {
        "test": 1,
        "train": 8,
        "validation": 1,
    }
    assert found["test"][0] == gsm(1)

    memory_fs.pipe("/gsm/train.jsonl", json.dumps(gsm(9)).encode())
    result = prepare("gsm8k", "memory://gsm", tmp_path / "out", cache_dir=tmp_path / "cache")
    assert rows_of(result["train"].path)[0]["reward_model"]["ground_truth"] == "9"


def test_a_source_that_cannot_be_used_is_described(tmp_path):
    with pytest.raises(DataError, match="no such file or folder"):
        read_source(tmp_path / "absent")
    with pytest.raises(DataError, match="no such file or folder"):
        read_source("./a/b")
    with pytest.raises(DataError, match=naming("answers.jsonl", "train", "test", "validation")):
        read_source(write_jsonl(tmp_path / "answers.jsonl", [gsm(1)]))
    broken = tmp_path / "train.jsonl"
    broken.write_text('{"question": "fine"}\n\n{"question": ')
    with pytest.raises(DataError, match=naming("train.jsonl", "line 3", "JSON")):
        read_source(broken)
    (tmp_path / "test.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(DataError, match=naming("test.jsonl.gz")):
        read_source(tmp_path / "test.jsonl.gz")
    (tmp_path / "test.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match=naming("test.parquet")):
        read_source(tmp_path / "test.parquet")


def test_unicode_line_separators_do_not_end_a_record(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"question": "a\u2028b"}\n', encoding="utf-8")
    assert read_source(path)["train"] == [{"question": "a\u2028b"}]


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


def test_arithmetic_asks_in_the_words_given(tmp_path):
    prepare("arithmetic", None, tmp_path, max_operand=1, held_out=0, question="What is {a}+{b}?")
    rows = pq.read_table(tmp_path / "train.parquet").to_pylist()
    assert {row["prompt"][0]["content"]: row["reward_model"]["ground_truth"] for row in rows} == {
        "What is 0+0?": "0",
        "What is 0+1?": "1",
        "What is 1+0?": "1",
        "What is 1+1?": "2",
    }
    with pytest.raises(DataError, match=naming("{a}", "{b}")):
        prepare("arithmetic", None, tmp_path, question="What is 1+1?")


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
    assert set(prompts("e", held_out=0)) == {"train"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_operand": 5, "max_operand": 4}, "min_operand=5, max_operand=4"),
        ({"min_operand": -1}, "min_operand=-1"),
        ({"held_out": 2.5}, "held_out=2.5"),
        ({"held_out": -0.1}, "held_out=-0.1"),
        ({"held_out": 100}, "100 held out"),
        ({"train_size": 99}, "99 to train"),
        ({"max_operand": 9_999}, "train_size"),
    ],
)
def test_impossible_arithmetic_is_refused(options, message, tmp_path):
    with pytest.raises(DataError, match=message):
        prepare("arithmetic", None, tmp_path, **options)
    with pytest.raises(DataError, match=naming("source")):
        prepare("arithmetic", "somewhere", tmp_path)


def test_unknown_names_are_answered_with_the_known_ones(tmp_path):
    with pytest.raises(DataError, match=naming("'gsm9k'", "arithmetic", "full_hh_rlhf", "gsm8k")):
        prepare("gsm9k", None, tmp_path)
    with pytest.raises(DataError, match=naming("gsm8k", "seed", "instruction", "cache_dir")):
        prepare("gsm8k", None, tmp_path, seed=1)


def test_the_command_line_passes_on_what_was_given(tmp_path):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = parser.parse_args(
        ["arithmetic", "--out", str(tmp_path), "--max-operand", "3", "--held-out", "4", "--seed", "7"]
    )
    result = prepare_from_arguments(given)
    assert {split: written.rows for split, written in result.items()} == {"train": 12, "test": 4}
    wrong = parser.parse_args(["gsm8k", "--out", str(tmp_path), "--max-operand", "3"])
    with pytest.raises(DataError, match=naming("gsm8k", "max_operand")):
        prepare_from_arguments(wrong)


def test_every_data_set_has_its_function():
    for name in DATASETS:
        with pytest.raises(DataError, match=naming(name, "nonsense")):
            prepare(name, None, "unused", nonsense=1)


def test_preparing_and_counting_import_no_torch():
    code = (
        "import sys, strop.data.fetch, strop.data.parquet\n"
        "import strop.cli.prepare\n"
        "from strop.prepare import arithmetic, maths\n"
        "sys.exit(' '.join(name for name in ('torch', 'transformers') if name in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
