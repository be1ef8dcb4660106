"""Rows from every format, from the hub and from memory; what becomes of prompts."""

from __future__ import annotations

import ast
import csv
import gzip
import json
import sys
import types

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strop.cli.main import main
from strop.config.load import load_config
from strop.config.paths import HubSplit, hub_split
from strop.data.control_tokens import PromptError, control_tokens
from strop.data.outline import outline
from strop.data.prompt_table import read_prompt_table, require_columns, with_ground_truths
from strop.data.prompts import PromptFormat, encode_prompts
from strop.data.records import to_rows
from strop.data.rl_dataset import RLHFDataset
from strop.data.sources import Rows, read_records, read_table
from strop.errors import DataError, ModelError
from strop.prepare import prepare

from messages import Message, naming

ROWS = [
    {"question": 'w1, "w2"\nw3', "answer": 42, "level": 1, "day": "2024-01-01"},
    {"question": "w4", "answer": 7, "level": 2, "day": "2024-01-02"},
]


@pytest.fixture
def sources(tmp_path):
    """The same rows in every format."""
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table, tmp_path / "t.parquet")
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "t.jsonl").write_text("\ufeff" + lines + "\n")
    (tmp_path / "t.json").write_text(json.dumps(ROWS, indent=1))
    with gzip.open(tmp_path / "t.jsonl.gz", "wt") as handle:
        handle.write(lines)
    with (tmp_path / "t.csv").open("w", newline="") as handle:
        writer = csv.DictWriter(handle, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)
    for folder in (
        "saved",
        "splits/train",
    ):  # as save_to_disk writes them
        (tmp_path / folder).mkdir(parents=True)
        with pa.ipc.new_stream(tmp_path / folder / "data-0.arrow", table.schema) as writer:
            writer.write_table(table)
        (tmp_path / folder / "state.json").write_text('{"_data_files": [{"filename": "data-0.arrow"}]}')
    (tmp_path / "splits/dataset_dict.json").write_text('{"splits": ["train"]}')
    names = ("t.parquet", "t.jsonl", "t.jsonl.gz", "t.json", "t.csv", "saved", "splits:train")
    files = [str(tmp_path / name) for name in names]
    return [*files, f"file://{tmp_path}/t.csv", Rows("list", ROWS), Rows("table", table)]


def test_every_format_gives_the_same_rows(sources, tokenizer):
    def rows_of(source):
        dataset = RLHFDataset(
            source,
            tokenizer,
            prompt_key="question",
            answer_key="answer",
            data_source="a/b",
            max_prompt_length=9,
        )
        return [{**row, "input_ids": row["input_ids"].tolist()} for row in map(dataset.__getitem__, range(2))]

    expected = {
        "data_source": "a/b", "reward_model": {"style": "rule", "ground_truth": "42"},
        "answer": "42", "level": 1, "day": "2024-01-01", "index": 0,
    }  # fmt: skip
    for source in sources:
        first, second = rows_of(source)
        assert {
            key: value for key, value in first.items() if key not in ("input_ids", "question")
        } == expected, source
        assert second["reward_model"]["ground_truth"] == "7"
        assert second["input_ids"] == [3, 14, 5]  # [user] w4 [assistant]


def test_a_dataset_of_the_package_is_read_as_arrow():
    class Dataset:
        num_rows = 2

        def with_format(self, kind):
            return self if kind == "arrow" else None

        def __getitem__(self, rows):
            assert rows == slice(None)
            return pa.Table.from_pylist(ROWS)

    Dataset.__module__ = "datasets.arrow_dataset"
    assert read_table(Rows("set", Dataset())).to_pylist() == ROWS


def test_json_texts_of_the_package_datasets_are_the_values_that_they_stand_for(tmp_path):
    """It stores values of several types so: a string has quotes in it, and a message is a text."""
    chats = [
        [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [{"n": 1}, {"n": "a"}]}],
        [{"role": "user", "content": [{"type": "text", "text": "r"}]}],
    ]
    as_json = [json.dumps(message) for chat in chats for message in chat]
    parts = {"a": pa.array(['{"k": [1, "x"]}', None], pa.json_()), "b": pa.array([None, "c"])}
    table = pa.table(
        {
            "prompt": pa.ListArray.from_arrays([0, 2, 3], pa.array(as_json, pa.json_())),
            "answer": pa.array(['"x"', "42"], pa.json_()),
            "ground_truth": pa.array(['"x"', '["y", "z"]'], pa.json_()),
            "more": pa.StructArray.from_arrays(list(parts.values()), list(parts)),
        }
    )
    pq.write_table(table, path := tmp_path / "t.parquet")
    expected = [
        {"prompt": chats[0], "answer": "x", "ground_truth": "x", "more": {"a": {"k": [1, "x"]}}},
        {"prompt": chats[1], "answer": "42", "ground_truth": ["y", "z"], "more": {"b": "c"}},
    ]
    for source in (path, Rows("table", table)):
        assert to_rows(read_table(source, texts=["answer"])) == expected
    assert list(read_records(path, ["answer"])) == expected
    with pytest.raises(DataError, match=naming("ground_truth", "several types", "text in row 0")):
        read_table(path, texts=["answer", "ground_truth"])
    broken = pa.table({"answer": pa.array(["{"], pa.json_())})
    with pytest.raises(DataError, match=naming("rows:broken", "answer", "JSON")):
        read_table(Rows("broken", broken))


def test_a_data_frame_is_read_without_its_index():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame([*ROWS, {"question": "w5", "answer": "x", "level": None}], index=[3, 4, 5])
    assert read_table(Rows("frame", frame))["answer"].to_pylist() == ["42", "7", "x"]
    large = [{"prompt": "w1", "answer": 10**30}, {"prompt": "w2", "answer": 4}]  # beyond 64 bits
    answers = (
        read_table(Rows("any", rows), texts=["answer"])["answer"] for rows in (large, pandas.DataFrame(large))
    )
    assert [column.to_pylist() for column in answers] == 2 * [[str(10**30), "4"]]
    numbered = [{0: "1+1=", 1: 2}, {0: "2+2=", 1: 4}]  # of a table without a header
    assert read_table(Rows("list", numbered)).to_pylist() == [{"0": "1+1=", "1": 2}, {"0": "2+2=", "1": 4}]


def test_answers_of_several_types_become_text(tmp_path):
    rows = [{"a": value, "n": {"b": value}} for value in (42, 42.0, 2.5, "x", True, None, 10**30)]
    texts = ["42", "42", "2.5", "x", "true", None, str(10**30)]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for table in (read_table(path), read_table(Rows("list", rows))):
        assert table["a"].to_pylist() == texts
        assert [record["b"] for record in table["n"].to_pylist()] == texts


def test_values_of_several_types_that_no_text_can_be_stay_what_they_are(tmp_path):
    rows = [{"a": "x", "b": value} for value in ("y", ["y", "z"], {"c": 1}, None, 2)]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for source in (path, Rows("list", rows)):
        assert to_rows(read_table(source, texts=["a"])) == rows


def test_columns_that_only_some_records_have_are_kept(monkeypatch):
    monkeypatch.setattr("strop.data.records.CHUNK_ROWS", 1)
    rows = [{"a": 1}, {"a": 2.5, "b": {"c": [1]}}, {"b": {"d": "x"}}]
    assert to_rows(read_table(Rows("list", rows))) == [
        {"a": 1.0, "b": None},
        {"a": 2.5, "b": {"c": [1]}},
        {"a": None, "b": {"d": "x"}},
    ]


def call(**arguments):
    return {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": arguments}]}


RAGGED = [
    {"prompt": [call(city="Ulm", n=1)], "extra_info": {"a": 1}, "answer": {"x": [1]}},
    {"prompt": [call(n="two", city=None)], "extra_info": {"b": {"c": None}}, "answer": {"x": {"y": 2.5}}},
    {"prompt": [call()], "extra_info": {"b": {}, "a": 2.0}, "answer": {}},
]
"""Records of the same columns with other keys, other types, other orders of keys, and nulls of their own."""


@pytest.mark.parametrize("form", ["list", "t.jsonl", "t.json"])
def test_nested_records_keep_their_own_keys_types_and_order(tmp_path, form):
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in RAGGED))
    (tmp_path / "t.json").write_text(json.dumps(RAGGED))
    source = Rows("list", RAGGED) if form == "list" else tmp_path / form
    assert json.dumps(to_rows(read_table(source))) == json.dumps(RAGGED)
    read = read_prompt_table(source, answer_keys={"answer": "answer"})
    assert json.dumps(read.values("prompt", 0, 3)) == json.dumps([row["prompt"] for row in RAGGED])
    row = with_ground_truths(read, "answer").row(1)
    assert row == {**RAGGED[1], "reward_model": {"style": "rule", "ground_truth": {"x": {"y": 2.5}}}}
    assert read.names == ["prompt", "extra_info", "answer"]


def test_a_nested_column_of_records_keeps_their_own_keys():
    rows = [{"task": {"chat": [call(a=1)]}}, {"task": {"chat": [call(b=None)]}}, {"task": {}}]
    table = read_prompt_table(Rows("list", rows), prompt_key="task.chat")
    assert table.values("task.chat", 0, 3) == [[call(a=1)], [call(b=None)], None]


def test_a_key_without_a_value_is_of_other_records_where_the_source_has_types(tmp_path):
    rows = [
        {"prompt": [call(city="Ulm")], "extra_info": {"a": 1}, "reward_model": {"ground_truth": None}},
        {"prompt": [call(zip=1)], "extra_info": {"z": 2}, "reward_model": {"ground_truth": {"c": 1}}},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    for source in (tmp_path / "t.parquet", Rows("arrow", pa.Table.from_pylist(rows))):
        read = read_prompt_table([source, Rows("list", RAGGED)])
        for number, row in enumerate(rows):  # the ground truth stays a key, as managers read it by its name
            assert read.row(number) == {**row, "answer": None}
        assert read.row(3) == {**RAGGED[1], "reward_model": None}
    assert to_rows(read_table(tmp_path / "t.parquet")) == rows


def test_token_ids_are_those_of_the_rows_own_keys(make_tokenizer, tmp_path):
    tokenizer = make_tokenizer(
        "{% for m in messages %}{% for c in m.tool_calls %}"
        "{% for k, v in c.arguments.items() %}{{ k }} {{ v }} {% endfor %}{% endfor %}{% endfor %}w9"
    )
    user = {"role": "user", "content": ""}
    rows = [{"prompt": [call(w1="w2"), user]}, {"prompt": [call(w3="w4"), user]}]
    options = {"max_prompt_length": 9, "cache_dir": tmp_path}
    for _ in range(2):  # the second time from the cache
        dataset = RLHFDataset(Rows("list", rows), tokenizer, **options)
        assert [row["input_ids"].tolist() for row in dataset] == [[11, 12, 19], [13, 14, 19]]
    nulls = [{"prompt": [call(w1="w2", w5=None), user]}, rows[1]]
    assert RLHFDataset(Rows("list", nulls), tokenizer, **options)[0]["input_ids"].tolist() == [
        11,
        12,
        15,
        2,
        19,
    ]


def test_prepare_stores_chats_that_parquet_would_change_as_text(tmp_path):
    rows = [{**row, "answer": "1", "meta": {}} for row in RAGGED]
    written = prepare("table", write_lines(tmp_path / "t.jsonl", rows), tmp_path / "out")
    found = pq.read_table(written["train"].path).to_pylist()
    assert [json.loads(row["prompt"]) for row in found] == [row["prompt"] for row in RAGGED]
    assert {row["meta"] for row in found} == {"{}"}


def test_prepare_stores_values_of_several_types_as_they_are(tmp_path):
    rows = [{"prompt": "p", "answer": "1", "aliases": value} for value in ("x", ["y", "z"], 3)]
    written = prepare("table", write_lines(tmp_path / "t.jsonl", rows), tmp_path / "out")
    path = written["train"].path
    for found in (to_rows(read_table(path)), list(read_records(path))):
        assert [row["aliases"] for row in found] == ["x", ["y", "z"], 3]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("a.jsonl", '{"prompt": "x"}\n\n{"prompt": \n', ("a.jsonl, line 3", "not JSON")),
        ("a.jsonl", '{"prompt": "x"},\n', ("a.jsonl, line 1", "no comma")),
        ("a.jsonl", '{"a": 1}\n{"a": [1]}\n', ("a.jsonl, field a", "number in line 1", "list in line 2")),
        ("a.jsonl", '{"extra_info": {}}\n{"extra_info": ""}\n', ("field extra_info", "object in line 1")),
        ("a.jsonl", '{"a": "\\ud800"}\n', ("a.jsonl, line 1", "Unicode")),
        ("a.json", '{\n"a": 1}', ("a.json, line 1", "a list of objects")),
        ("a.json", "[1]", ("a.json, record 0", "found 1")),
        ("a.csv", "a,b\n1,2\n1,2,3\n", ("a.csv", "Row #3", "Expected 2 columns, got 3")),
        ("a.csv", 'a,b\n1,"x\ny"\n2,"z\n3,w\n', ("a.csv, line 4", "quote")),
        ("a.csv", 'a,b\n1,x\n"2,y\n3,"z"\n4,w\n', ("a.csv, line 3", "quote")),
        ("a.csv", "a,a\n1,2\n", ("a.csv", "two columns", "'a'")),
        ("a.csv", b"a,b\n1,x\n2,gr\xfcn\n", ("a.csv, line 3", "not UTF-8", "gr\\xfcn", "iconv -f LATIN1")),
        ("a.csv", b"gr\xfcn,b\n1,x\n", ("a.csv, line 1", "not UTF-8")),
        ("a.csv", "a;b\n1;x\n2;grün\n".encode("utf-16"), ("a.csv: the text is UTF-16", "iconv -f UTF-16")),
        ("a.jsonl", b'{"a": "x"}\n{"a": "gr\xfcn"}\n', ("a.jsonl, line 2", "not UTF-8", "iconv")),
        ("a.json", '[{"a": "x"}]'.encode("utf-16"), ("a.json: the text is UTF-16", "iconv")),
        ("a.xlsx", "x", ("a.xlsx", "format is not known", ".csv")),
    ],
)
def test_an_unreadable_file_is_named_with_the_place(name, content, parts, tmp_path):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=naming(*parts)):
        read_table(tmp_path / name, texts=["a"])


def test_two_columns_of_one_name_are_named_in_formats_that_may_have_them(tmp_path):
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    pq.write_table(twice, file := tmp_path / "twice.parquet")
    for source in (file, Rows("table", twice)):
        with pytest.raises(DataError, match=naming(source, "two columns", "'prompt'")):
            read_table(source)
    with pytest.raises(DataError, match=naming(file, "two columns", "'prompt'")):
        list(read_records(file))
    config = load_config([f"data.train_files={file}", "actor_rollout_ref.model.path=model"])
    assert [str(error) for error in outline(config).errors] == [Message("twice.parquet", "two columns")]


def test_a_frame_with_two_columns_of_one_name_and_a_series_are_named():
    pandas = pytest.importorskip("pandas")
    frame = pandas.concat([pandas.DataFrame({"prompt": ["a"]})] * 2, axis=1)  # a join by position
    for data, parts in ((frame, ("two columns", "'prompt'")), (frame.iloc[:, 0], ("found", "Series"))):
        with pytest.raises(DataError, match=naming("rows:frame", *parts)):
            read_table(Rows("frame", data))


@pytest.mark.parametrize(
    "state", ["{", "{}", "[1]", '{"_data_files": 3}', '{"_data_files": [3]}', "[" * 9999]
)
@pytest.mark.parametrize("name", ["state.json", "dataset_dict.json"])
def test_a_damaged_file_of_a_saved_data_set_is_named(state, name, tmp_path):
    (tmp_path / name).write_text(state)
    with pytest.raises(DataError, match=naming(str(tmp_path / name), "save_to_disk")):
        read_table(tmp_path)


@pytest.mark.parametrize("nested", ["[" * 800 + "]" * 800, '{"a":' * 300 + "1" + "}" * 300, "[" * 9999])
def test_values_that_are_nested_too_deep_are_named(nested, tmp_path):
    (tmp_path / "t.jsonl").write_text(f'{{"prompt": "x", "more": {nested}}}\n')
    with pytest.raises(DataError, match=naming("t.jsonl")):
        read_prompt_table(tmp_path / "t.jsonl")


@pytest.mark.parametrize("header", ["prompt," + "b" * 1_200_000, ",".join(f"c{i}" for i in range(200_000))])
def test_a_header_without_an_end_is_one_short_error(header, tmp_path):
    for name in ("t.csv", "t.tsv"):
        (tmp_path / name).write_text(f"{header}\nx,1\n")
        with pytest.raises(DataError, match=naming(name, "first line")) as caught:
            read_table(tmp_path / name)
        assert len(str(caught.value)) < 300


def test_a_quote_within_a_csv_text_is_kept(tmp_path):
    (tmp_path / "a.csv").write_text('a,b\n15" screen,1\n"an ""x""",2\n')
    assert read_table(tmp_path / "a.csv").to_pylist() == [
        {"a": '15" screen', "b": 1},
        {"a": 'an "x"', "b": 2},
    ]


def test_a_field_of_csv_may_be_as_long_as_a_book(tmp_path):
    (tmp_path / "t.csv").write_text(f"prompt,b\n{'x' * 3_000_000},1\ny,2\n")
    assert read_table(tmp_path / "t.csv")["b"].to_pylist() == [1, 2]


@pytest.mark.parametrize("name", ["t.jsonl.gz", "t.json.gz", "t.csv.gz", "t.tsv.gz"])
@pytest.mark.parametrize("line", [b'{"prompt": "xxxxxxxxxx"}\n', b"x" * 25])
def test_a_file_that_would_fill_the_memory_is_refused_on_the_way(name, line, tmp_path, monkeypatch):
    monkeypatch.setattr("strop.data.records._ANY_EXPANSION", 100_000)
    with gzip.open(tmp_path / name, "wb") as handle:
        handle.write(b"[" if ".json." in name else b"prompt\n" if ".jsonl" not in name else b"")
        handle.write(line * 200_000)  # 5 MB of 10 kB
    with pytest.raises(DataError, match=naming(name, "expands")):
        read_table(tmp_path / name)
    (row,) = [{"prompt": "x" * 50}]
    with gzip.open(tmp_path / "u.jsonl.gz", "wt") as handle:
        handle.write(json.dumps(row) + "\n")
    assert read_table(tmp_path / "u.jsonl.gz").to_pylist() == [row]


def test_a_missing_column_is_named_with_the_nearest_one(sources, tokenizer):
    for keys, parts in (
        (
            {"prompt_key": "questoin"},
            ("questoin", "'level'", "set data.prompt_key=question data.answer_key=answer"),
        ),
        (
            {"prompt_key": "question", "answer_key": "answr"},
            ("answr", "set data.answer_key=answer"),
        ),
    ):
        with pytest.raises(DataError, match=naming(*parts)):
            RLHFDataset(sources[1], tokenizer, max_prompt_length=9, **keys)


@pytest.mark.parametrize(
    ("columns", "keys", "advice"),
    [
        (("Problem", "label"), {"prompt": "prompt"}, "set data.prompt_key=Problem data.answer_key=label"),
        (("problem", "reward_model"), {"prompt": "prompt"}, "set data.prompt_key=problem"),
        (("x y", "answer"), {"prompt": "prompt"}, "set data.prompt_key to one of them"),
        (("question", " answer"), {"prompt": "question", "answer": "answer"}, "below them, in the file"),
        (
            ("instruction", "output"),
            {"prompt": "prompt", "response": "response"},
            "set data.prompt_key=instruction data.response_key=output",
        ),
        (
            ("prompt", "better"),
            {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
            "set data.chosen_key and data.rejected_key to one of them",
        ),
        (("instruction", "input", "output"), {"prompt": "prompt"}, "the instruction asks about the input"),
        (
            ("chosen", "rejected"),
            {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
            "and what follows them in chosen and rejected",
        ),
        (
            ("messages",),
            {"prompt": "messages", "response": "response"},
            "its text in a column response (strop docs supervised)",
        ),
    ],
)
def test_keys_are_suggested_for_the_columns_that_there_are(columns, keys, advice):
    table = pa.table({column: pa.array([], pa.string()) for column in columns})
    with pytest.raises(DataError) as caught:
        require_columns("t.csv", table, keys)
    assert str(caught.value).endswith(advice)


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        ('\ufeffquestion;answer\r\n"2;3";5\r\n', [{"question": "2;3", "answer": 5}]),
        ('"question"\t"answer"\n2,3\t5\n', [{"question": "2,3", "answer": 5}]),
        ("question;it,answer\n2;3,5\n", [{"question;it": "2;3", "answer": 5}]),
        ("question\n2;3\n", [{"question": "2;3"}]),
        ("question;answer\r2;3\r4;5", [{"question": 2, "answer": 3}, {"question": 4, "answer": 5}]),
    ],
)
def test_csv_files_may_have_the_semicolons_or_tabs_of_spreadsheets(tmp_path, content, rows):
    (tmp_path / "t.csv").write_bytes(content.encode())
    with gzip.open(tmp_path / "t.csv.gz", "wb") as handle:
        handle.write(content.encode())
    assert read_table(tmp_path / "t.csv").to_pylist() == rows
    assert read_table(tmp_path / "t.csv.gz").to_pylist() == rows


@pytest.mark.parametrize(
    ("content", "advice"),
    [
        (b"PK\x03\x04\x14\x00\x08\xff", "save it as CSV"),
        (gzip.compress(b"prompt\n1\n2\n", mtime=0), "must end in .gz"),
    ],
)
@pytest.mark.parametrize("name", ["t.csv", "t.jsonl"])
def test_a_file_of_another_kind_than_its_name_is_named_as_what_it_is(tmp_path, name, content, advice):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=naming(name, advice)):
        read_table(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (json.dumps({"data": [{"prompt": "1"}]}), "with data"),
        (json.dumps({"version": "1", "data": [{"prompt": "1"}]}, indent=1), "over several lines"),
        (json.dumps({"prompt": ["1", "2"], "answer": ["3", "4"]}), "with prompt, answer"),
        (json.dumps({"prompt": {"0": "1"}, "answer": {"0": "3"}}), "to_json"),  # as pandas writes it
    ],
)
def test_one_object_with_all_rows_is_not_one_row(tmp_path, text, part):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(DataError, match=naming("t.json", part, "a list of objects")):
        read_table(tmp_path / "t.json")


def test_a_json_file_may_have_one_row(tmp_path):
    row = {"prompt": [{"role": "user", "content": "1"}]}
    (tmp_path / "t.json").write_text(json.dumps(row))
    assert read_table(tmp_path / "t.json").to_pylist() == [row]


def test_columns_of_a_tsv_file_are_separated_by_tabs(tmp_path, tokenizer):
    (tmp_path / "t.tsv").write_text("question,it\tanswer;s\n2,3\t5\n")
    assert read_table(tmp_path / "t.tsv").to_pylist() == [{"question,it": "2,3", "answer;s": 5}]
    (tmp_path / "t.csv").write_text("question|answer\n2|3\n")
    with pytest.raises(DataError, match=naming("'|' separates", "commas, semicolons or tabs")):
        RLHFDataset(tmp_path / "t.csv", tokenizer, prompt_key="question", max_prompt_length=9)


def test_nested_columns_are_reached_with_a_dot(tokenizer):
    rows = Rows("nested", [{"task": {"text": "w1", "solution": 3}}])
    dataset = RLHFDataset(
        rows, tokenizer, prompt_key="task.text", answer_key="task.solution", max_prompt_length=9
    )
    assert dataset[0]["input_ids"].tolist() == [3, 11, 5]
    assert dataset[0]["reward_model"]["ground_truth"] == "3"


def test_a_split_on_the_hub_is_loaded_by_its_package(monkeypatch, tmp_path):
    assert hub_split("openai/gsm8k/main@v1:train[:10%]") == HubSplit(
        "openai/gsm8k", "main", "v1", "train[:10%]"
    )
    assert hub_split("data/train.jsonl") is None
    assert hub_split("s3://bucket/train.jsonl") is None
    asked = []

    class Loaded:
        def with_format(self, kind):
            return pa.table({"prompt": ["w1"]})

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return Loaded()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert read_table("openai/gsm8k/main:train").to_pylist() == [{"prompt": "w1"}]
    assert asked == [(("openai/gsm8k", "main"), {"split": "train"})]


def test_a_system_prompt_and_variables_reach_the_template(make_tokenizer):
    tokenizer = make_tokenizer(
        "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}{% if more %} w9{% endif %}"
    )
    how = PromptFormat(system_prompt="w7", apply_chat_template_kwargs={"more": True})
    assert encode_prompts(["w1"], tokenizer, how) == [[4, 17, 3, 11, 5, 19]]
    own = [{"role": "system", "content": "w8"}, {"role": "user", "content": "w1"}]
    assert encode_prompts([own], tokenizer, how) == [[4, 18, 3, 11, 5, 19]]


def test_a_prompt_that_ends_with_an_assistant_turn_is_continued(tokenizer):
    user, begun = {"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}
    assert encode_prompts([[user, begun], [user]], tokenizer) == [[3, 11, 5, 12], [3, 11, 5]]
    dataset = RLHFDataset(
        Rows("chats", [{"prompt": [user, begun]}, {"prompt": [user]}]), tokenizer, max_prompt_length=9
    )
    assert "1 end with an assistant turn" in dataset.prompts_in_words


def test_special_tokens_count_only_where_they_are_allowed(tokenizer):
    assert "<s>" in control_tokens(tokenizer).names
    plain = PromptFormat(apply_chat_template=False)
    rendered = PromptFormat(apply_chat_template=False, allow_special_tokens=True)
    assert encode_prompts(["<s> w1"], tokenizer, rendered) == [[1, 11]]  # and no second BOS
    assert encode_prompts(["w1 <s>"], tokenizer, rendered) == [[1, 11, 1]]
    with pytest.raises(PromptError, match=naming("control token")):  # words of this tokenizer have no parts
        encode_prompts(["w1 <s>"], tokenizer, plain)


@pytest.mark.parametrize(
    ("how", "template", "is_text", "kind", "parts"),
    [
        (
            {"apply_chat_template": True},
            None,
            True,
            ModelError,
            ("apply_chat_template=true",),
        ),
        (
            {"apply_chat_template": False},
            "x",
            False,
            DataError,
            ("apply_chat_template=false",),
        ),
        ({"apply_chat_template": False, "system_prompt": "a"}, "x", True, DataError, ("data.system_prompt",)),
        ({"system_prompt": "a"}, None, True, DataError, ("data.system_prompt", "no chat template")),
    ],
)
def test_settings_that_do_not_fit_the_prompts_are_errors(how, template, is_text, kind, parts, make_tokenizer):
    with pytest.raises(kind, match=naming(*parts)):
        PromptFormat(**how).in_words(make_tokenizer(template), is_text=is_text)


def test_plain_prompts_of_a_base_model_name_the_key_of_a_template(make_tokenizer):
    assert "data.chat_template" in PromptFormat().in_words(make_tokenizer(None), is_text=True)
    as_set = PromptFormat(apply_chat_template=False)
    assert "data.chat_template" not in as_set.in_words(make_tokenizer("x"), is_text=True)


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.csv.gz", "T.CSV.GZ"])
@pytest.mark.parametrize(
    "values", [("007", "42"), ("1.50", "2"), ("True", "false"), ("2024-01-02", "2024-01-03"), ("NA", "nan")]
)
def test_questions_and_answers_of_a_csv_file_are_its_texts(tmp_path, values, name, tokenizer, score_file):
    mark = "\t" if name == "t.tsv" else ","
    lines = [
        ("prompt", "answer", "note"),
        (*values, values[0]),
        (values[1], "", values[1]),
        ("null", "1", ""),
    ]
    content = "".join(mark.join(line) + "\n" for line in lines)
    opened = gzip.open if name.lower().endswith(".gz") else open
    with opened(tmp_path / name, "wt") as handle:
        handle.write(content)
    dataset = RLHFDataset(tmp_path / name, tokenizer, max_prompt_length=9, answer_key="answer")
    assert [row["prompt"] for row in dataset] == [*values, "null"]
    assert [row["answer"] for row in dataset] == [values[1], "", "1"]
    assert [row["reward_model"]["ground_truth"] for row in dataset] == [values[1], "", "1"]
    assert score_file(tmp_path / name, "prompt", "answer") == [values, (values[1], ""), ("null", "1")]
    written = prepare("table", tmp_path / name, tmp_path / "out")["train"]
    (row, _) = pq.read_table(written.path).to_pylist()  # the one without an answer is skipped
    assert row["prompt"] == [{"role": "user", "content": values[0]}]
    assert row["reward_model"]["ground_truth"] == values[1]


def test_a_column_of_a_csv_file_with_a_leading_zero_is_text(tmp_path):
    """A reward that looks for the code 007 in a response must not accept 7."""
    (tmp_path / "t.csv").write_text("code,n,share\n007,0,0.5\n12,10,1\n,-3,2\n")
    table = read_table(str(tmp_path / "t.csv"))
    assert table["code"].to_pylist() == ["007", "12", ""]
    assert table["n"].to_pylist() == [0, 10, -3]
    assert table["share"].to_pylist() == [0.5, 1.0, 2.0]


@pytest.fixture
def score_file(tmp_path):
    """score_file(file, response column, truth column) -> the texts that a function is called with."""

    def score(path, response, truth):
        (tmp_path / "reward.py").write_text(
            f"def compute_score(solution_str, ground_truth):\n"
            f"    with open({str(tmp_path / 'seen.jsonl')!r}, 'a') as file:\n"
            f"        print((solution_str, ground_truth), file=file)\n"
            f"    return 1.0\n"
        )
        (tmp_path / "seen.jsonl").write_text("")
        options = ["--response-column", response, "--ground-truth-column", truth]
        assert main(["score", str(path), *options, "--custom", str(tmp_path / "reward.py")]) == 0
        return list(map(ast.literal_eval, (tmp_path / "seen.jsonl").read_text().splitlines()))

    return score


def test_an_empty_answer_of_a_csv_file_is_an_error_only_for_a_built_in_scorer(tmp_path, tokenizer):
    (tmp_path / "t.csv").write_text("prompt,answer\n1,2\n3,\n")
    dataset = RLHFDataset(
        tmp_path / "t.csv", tokenizer, max_prompt_length=9, answer_key="answer", data_source="openai/gsm8k"
    )
    with pytest.raises(DataError, match=naming("row 1", "ground_truth", "empty")):
        dataset.require_ground_truths({"openai/gsm8k"}, by_model=False)


def test_numeric_questions_of_other_formats_are_texts(tmp_path, tokenizer):
    pq.write_table(pa.table({"prompt": [1, 2]}), tmp_path / "t.parquet")
    for source in (tmp_path / "t.parquet", Rows("list", [{"prompt": 1}, {"prompt": 2}])):
        assert RLHFDataset(source, tokenizer, max_prompt_length=9)[1]["prompt"] == "2"


def test_prepare_table_names_columns_and_keeps_the_others(sources, tmp_path):
    written = prepare("table", sources[4], tmp_path / "out", prompt="question", data_source="a/b")
    assert list(written) == ["train"]
    assert pq.read_table(written["train"].path).to_pylist()[1] == {
        "data_source": "a/b",
        "prompt": [{"role": "user", "content": "w4"}],
        "answer": "7",
        "level": 2,
        "day": "2024-01-02",
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "extra_info": {"split": "train", "index": 1},
    }
    with pytest.raises(DataError, match=naming("no field solution")):
        prepare("table", sources[1], tmp_path / "none", prompt="question", answer="solution")


def test_prepare_table_writes_the_same_rows_of_all_sources(sources, tmp_path):
    def rows_of(source):
        return pq.read_table(prepare("table", source, tmp_path / "out", prompt="question")["train"].path)

    rows = rows_of(sources[0]).to_pylist()
    assert [(row["answer"], row["reward_model"]["ground_truth"]) for row in rows] == [
        ("42", "42"),
        ("7", "7"),
    ]
    for source in sources[1:7]:  # the last is a split of a folder
        assert rows_of(source).to_pylist() == rows, source


def test_views_of_texts_are_texts(tmp_path, tokenizer):
    """As polars hands its columns over."""
    view = pa.string_view()
    chats = pa.large_list(pa.struct([("role", view), ("content", view)]))
    rows = [{"prompt": [{"role": "user", "content": "1+2="}], "data_source": "d", "answer": "3"}]
    kinds = pa.schema([("prompt", chats), ("data_source", view), ("answer", view)])
    for found in (Rows("views", pa.Table.from_pylist(rows, kinds)), Rows("rows", rows)):
        dataset = RLHFDataset(found, tokenizer, max_prompt_length=8)
        assert (
            dataset[0]["input_ids"].tolist()
            == RLHFDataset(Rows("rows", rows), tokenizer, max_prompt_length=8)[0]["input_ids"].tolist()
        )
        assert dataset.data_sources() == {"d"}
    texts = pa.table({"prompt": pa.array(["1+2="], view), "response": pa.array(["3"], view)})
    assert read_table(Rows("texts", texts)).schema.types == [pa.large_string()] * 2
