from __future__ import annotations

import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strop.data.prompt_table import read_prompt_table
from strop.data.sources import read_records
from strop.errors import DataError

from messages import naming


def test_files_are_joined_in_the_order_given(write):
    second = write("b.parquet", [{"prompt": "b0"}])
    first = write("a.parquet", [{"prompt": "a0"}, {"prompt": "a1"}])
    table = read_prompt_table([str(second), first])
    assert table.values("prompt", 0, 3) == ["b0", "a0", "a1"]
    assert table.locate(0) == (str(second), 0)
    assert table.locate(1) == (str(first), 0)
    assert table.locate(2) == (str(first), 1)


def test_nested_values_become_plain_python(write):
    path = write(
        "a.parquet",
        [{"prompt": [{"role": "user", "content": "hi"}], "extra_info": {"tags": ["x", "y"], "n": 3}}],
    )
    row = read_prompt_table(path).row(0)
    assert row == {"prompt": [{"role": "user", "content": "hi"}], "extra_info": {"tags": ["x", "y"], "n": 3}}
    assert type(row["extra_info"]["tags"]) is list


def test_files_with_different_extra_columns_are_joined_and_rows_keep_their_own_keys(write):
    a = write("a.parquet", [{"prompt": "a", "extra_info": {"x": 1}}])
    b = write("b.parquet", [{"prompt": "b", "extra_info": {"y": "z"}, "level": "hard"}])
    table = read_prompt_table([a, b])
    assert table.row(0) == {"prompt": "a", "extra_info": {"x": 1}, "level": None}
    assert table.row(1) == {"prompt": "b", "extra_info": {"y": "z"}, "level": "hard"}


def test_files_that_cannot_be_read_are_named(write, tmp_path):
    (tmp_path / "json.parquet").write_text('{"prompt": "json, in truth"}')
    for path in (tmp_path / "absent.parquet", tmp_path / "json.parquet"):
        with pytest.raises(DataError, match=naming(path.name)):
            read_prompt_table([str(path)])
    with pytest.raises(DataError, match=naming(tmp_path, "folder")):
        read_prompt_table(tmp_path)
    with pytest.raises(DataError, match=naming("none.parquet")):
        read_prompt_table(write("none.parquet", prompt=pa.array([], pa.string())))
    with pytest.raises(DataError, match="no data file was given"):
        read_prompt_table([])
    a, b = write("a.parquet", [{"prompt": "a"}]), write("b.parquet", [{"prompt": [1]}])
    with pytest.raises(DataError, match=naming("a.parquet", "b.parquet")):
        read_prompt_table([a, b])


def test_a_missing_column_is_named_with_those_there_are(write):
    path = write("a.parquet", [{"question": "?", "answer": "!"}])
    with pytest.raises(DataError, match=naming("column 'prompt'", "'question'", "'answer'")):
        read_prompt_table(path)
    assert len(read_prompt_table(path, prompt_key="question")) == 1


def test_a_url_is_read_through_the_cache(write, memory_fs, tmp_path):
    memory_fs.pipe("/bucket/a.parquet", write("a.parquet", [{"prompt": "far away"}]).read_bytes())
    table = read_prompt_table("memory://bucket/a.parquet", cache_dir=tmp_path / "cache")
    assert table.row(0) == {"prompt": "far away"}
    assert table.locate(0) == ("memory://bucket/a.parquet", 0)
    assert [path.name for path in (tmp_path / "cache").rglob("*.parquet")] == ["a.parquet"]


def _not_utf8(rows: int, bad: int) -> pa.Array:
    """Return text "a" in every row; row ``bad`` has a byte that UTF-8 does not know."""
    offsets = pa.array(range(rows + 1), pa.int32()).buffers()[1]
    content = pa.py_buffer(b"a" * bad + b"\xff" + b"a" * (rows - bad - 1))
    return pa.Array.from_buffers(pa.string(), rows, [None, offsets, content])


@pytest.mark.parametrize("command", ["read", "score"])
@pytest.mark.parametrize("nested", [False, True])
def test_text_that_is_not_utf8_is_named_by_file_row_and_column(tmp_path, command, nested):
    texts = _not_utf8(5, bad=3)
    column = pa.StructArray.from_arrays([texts], ["note"]) if nested else texts
    table = pa.table({"prompt": ["a"] * 5, "response": ["a"] * 5, "more": column})
    pq.write_table(table, tmp_path / "a.parquet")
    read = read_prompt_table if command == "read" else (lambda path: list(read_records(path)))
    with pytest.raises(DataError, match=naming("a.parquet", "row 3", "more", "UTF-8")):
        read(tmp_path / "a.parquet")


def test_times_that_python_does_not_have_are_named(tmp_path):
    table = pa.table({"prompt": ["a", "b"], "at": pa.array([0, 2**60], pa.timestamp("ms"))})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=naming("a.parquet", "row 1", "at")):
        read_prompt_table(tmp_path / "a.parquet")


def test_a_damaged_file_is_a_data_error_wherever_the_damage_is(write):
    path = write("a.parquet", [{"prompt": [{"role": "user", "content": "hi"}], "extra_info": {"n": 3}}] * 3)
    whole = path.read_bytes()
    footer = int.from_bytes(whole[-8:-4], "little") + 8
    chance, errors = random.Random(0), []
    for number in range(1500):
        content = bytearray(whole)
        start = len(content) - footer if number % 3 else 0
        content[chance.randrange(start, len(content))] = chance.randrange(256)
        path.write_bytes(content[: chance.randrange(len(content))] if number % 10 == 0 else content)
        try:
            table = read_prompt_table(path)
            table.values("prompt", 0, 3)
        except DataError as error:
            errors.append(str(error))
    assert len(errors) > 500
    assert all("a.parquet" in error for error in errors)
