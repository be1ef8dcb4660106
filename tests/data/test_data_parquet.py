from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strop.data.parquet import count_rows, read_prompt_table
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
    assert count_rows([str(second), str(first)]) == 3


def test_nested_values_become_plain_python(write):
    path = write(
        "a.parquet",
        [{"prompt": [{"role": "user", "content": "hi"}], "extra_info": {"tags": ["x", "y"], "n": 3}}],
    )
    row = read_prompt_table(path).row(0)
    assert row == {"prompt": [{"role": "user", "content": "hi"}], "extra_info": {"tags": ["x", "y"], "n": 3}}
    assert type(row["extra_info"]["tags"]) is list


def test_files_with_different_extra_columns_are_joined_with_nulls(write):
    a = write("a.parquet", [{"prompt": "a", "extra_info": {"x": 1}}])
    b = write("b.parquet", [{"prompt": "b", "extra_info": {"y": "z"}, "level": "hard"}])
    table = read_prompt_table([a, b])
    assert table.row(0) == {"prompt": "a", "extra_info": {"x": 1, "y": None}, "level": None}
    assert table.row(1) == {"prompt": "b", "extra_info": {"x": None, "y": "z"}, "level": "hard"}


def test_files_that_cannot_be_read_are_named(write, tmp_path):
    (tmp_path / "json.parquet").write_text('{"prompt": "json, in truth"}')
    for path in (tmp_path / "absent.parquet", tmp_path / "json.parquet"):
        for read in (read_prompt_table, count_rows):
            with pytest.raises(DataError, match=naming(path.name)):
                read([str(path)])
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
    assert pq.read_metadata(table.paths[0]).num_rows == 1
    assert table.paths[0].is_relative_to(tmp_path / "cache")
