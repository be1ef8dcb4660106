from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest

from strop.errors import DataError
from strop.prepare import prepare
from strop.prepare.code import called_function

from messages import mentions, naming


def write(path, records):
    path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    return path


def rows_of(written):
    return pq.read_table(written.path).to_pylist()


def truth_of(row):
    return json.loads(row["reward_model"]["ground_truth"])


def mbpp(task, **changes):
    return {
        "task_id": task,
        "text": "Write a function to add.",
        "code": "def add(a, b):\r\n\treturn a + b",
        "test_setup_code": "",
        "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
    } | changes


def test_a_humaneval_row_carries_its_tests(tmp_path):
    record = {
        "task_id": "HumanEval/0",
        "prompt": 'def one():\n    """One."""\n',
        "entry_point": "one",
        "canonical_solution": "    return 1\n",
        "test": "def check(candidate):\n    assert candidate() == 1\n",
    }
    source = write(tmp_path / "HumanEval.jsonl", [record, record | {"test": "assert one() == 1"}])
    [row] = rows_of(prepare("humaneval", source, tmp_path / "out", instruction="Do!")["test"])
    assert row["prompt"][0]["content"] == 'Do!\n\n```python\ndef one():\n    """One."""\n```'
    assert row["data_source"] == "openai/openai_humaneval"
    assert row["extra_info"]["task_id"] == "HumanEval/0"
    assert truth_of(row) == {
        "kind": "assert",
        "prefix": record["prompt"],
        "entry_point": "one",
        "tests": [record["test"]],
    }
    assert "there is no function check" in (tmp_path / "out" / "test.rejected.jsonl").read_text()


def test_an_mbpp_row_shows_one_test_and_carries_all(tmp_path):
    records = [mbpp(1), mbpp(2, test_setup_code="x = Node(1)\r\ny = x")]
    plain, with_setup = rows_of(prepare("mbpp", write(tmp_path / "train.jsonl", records), tmp_path)["train"])
    assert plain["prompt"][0]["content"].endswith("like this one:\n\n```python\nassert add(1, 2) == 3\n```")
    assert truth_of(plain) == {
        "kind": "assert",
        "prefix": "",
        "entry_point": "add",
        "tests": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
    }
    assert "```python\nx = Node(1)\ny = x\nassert add(1, 2) == 3\n```" in with_setup["prompt"][0]["content"]
    assert truth_of(with_setup)["tests"][0] == "x = Node(1)\ny = x"


def test_mbpp_in_one_file_is_divided_as_published(tmp_path):
    source = write(tmp_path / "mbpp.jsonl", [mbpp(task) for task in (1, 10, 11, 510, 511, 600, 601, 974)])
    written = prepare("mbpp", source, tmp_path / "out")
    assert {
        split: [row["extra_info"]["task_id"] for row in rows_of(made)] for split, made in written.items()
    } == {
        "prompt": ["1", "10"],
        "test": ["11", "510"],
        "validation": ["511", "600"],
        "train": ["601", "974"],
    }
    with pytest.raises(DataError, match=naming("field task_id", "1", "974", "975")):
        prepare("mbpp", write(tmp_path / "mbpp.jsonl", [mbpp(975)]), tmp_path / "out")
    with pytest.raises(DataError, match=naming("field task_id", "1", "'x'")):
        prepare("mbpp", write(tmp_path / "mbpp.jsonl", [mbpp("x")]), tmp_path / "out")


def test_the_called_function_is_the_one_called():
    code = "class Pair: pass\ndef helper(): pass\ndef longest(pairs): pass"
    assert called_function(code, "assert set(longest([Pair()])) == {1}") == "longest"
    with pytest.raises(DataError, match=naming("code")):
        called_function(code, "assert shortest([]) == 1")
    with pytest.raises(DataError, match=naming("Python")):
        called_function("def longest(", "assert longest([]) == 1")


@pytest.mark.parametrize("tests", [None, [], "assert add(1, 2) == 3", [1]])
def test_mbpp_without_tests_is_listed(tests, tmp_path):
    source = write(tmp_path / "train.jsonl", [mbpp(1), mbpp(2, test_list=tests)])
    assert prepare("mbpp", source, tmp_path)["train"].rows == 1
    assert mentions((tmp_path / "train.rejected.jsonl").read_text(), "test_list")
