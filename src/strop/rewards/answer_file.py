"""Reading a file of answers: parquet or JSONL, one answer a row."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from strop.errors import DataError

RESPONSE_COLUMNS = ("response", "responses", "solution_str", "solution", "answer")
GROUND_TRUTH_COLUMNS = ("reward_model.ground_truth", "ground_truth")

_MISSING = object()


def read_rows(path: str | Path) -> Iterator[dict[str, Any]]:
    """The rows of a ``.parquet`` or ``.jsonl`` file, one by one; ``DataError`` names file and line."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    if path.suffix in (".jsonl", ".json"):
        return _json_rows(path)
    raise DataError(f"{path}: expected a .parquet or .jsonl file")


def value_at(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column; a dotted name (``extra_info.answer``) reaches into nested ones.

    Raises ``KeyError`` when it is not there.
    """
    found = _look_up(row, column)
    if found is _MISSING:
        raise KeyError(column)
    return found


def find_column(row: Mapping[str, Any], candidates: tuple[str, ...], option: str) -> str:
    """The first of the candidates that the row has; ``DataError`` names the option that chooses another."""
    for column in candidates:
        if _look_up(row, column) is not _MISSING:
            return column
    raise DataError(
        f"no column {' or '.join(candidates)}; the columns are {', '.join(row)}. Choose one with {option} "
        "(a dot reaches into nested columns)"
    )


def _look_up(row: Mapping[str, Any], column: str) -> Any:
    if column in row:
        return row[column]
    value: Any = row
    for name in column.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return _MISSING
        value = value[name]
    return value


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except pa.ArrowException as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from error


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}, line {number}: this is not JSON ({error})") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number}: expected an object with a key for each column")
            yield row
