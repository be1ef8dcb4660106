"""Tables of prompts: reading, and checks of the columns that rewards need.

Rows count from 0 in every message. Nothing here imports torch.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from strop.data.fetch import local_path
from strop.errors import DataError

Files = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class PromptTable:
    """The rows of one or several files, in order.

    ``files`` are the names as the user wrote them, ``paths`` their local copies, ``starts`` the row number of
    each file's first row in ``table``. A column that only some files have is null in the rows of the others.
    """

    table: pa.Table
    files: tuple[str, ...]
    paths: tuple[Path, ...]
    starts: tuple[int, ...]

    def __len__(self) -> int:
        return self.table.num_rows

    @property
    def names(self) -> list[str]:
        """Names of the columns that at least one file has."""
        return self.table.column_names

    def locate(self, row: int) -> tuple[str, int]:
        """Return the file of row ``row`` of the table, and its row number in the file."""
        which = bisect_right(self.starts, row) - 1
        return self.files[which], row - self.starts[which]

    def error(self, row: int, field: str, problem: str) -> DataError:
        """Return an error that names file, row and field."""
        name, row_in_file = self.locate(row)
        return DataError(f"{name}, row {row_in_file}, field {field}: {problem}")

    def values(self, column: str, start: int, stop: int) -> list[Any]:
        """Return rows ``start`` to ``stop`` of a column as plain Python values."""
        return self.table.column(column).slice(start, stop - start).to_pylist()

    def row(self, row: int) -> dict[str, Any]:
        """Return one row as plain Python values."""
        return self.table.slice(row, 1).to_pylist()[0]


def count_rows(files: Sequence[str]) -> int:
    """Return the total number of rows of local files, from their footers."""
    total = 0
    for name in files:
        with _reading(name):
            total += pq.read_metadata(name).num_rows
    return total


def read_prompt_table(
    files: Files, *, prompt_key: str = "prompt", cache_dir: str | Path | None = None
) -> PromptTable:
    """Read all files into one table.

    Raises :class:`DataError` for a missing or unreadable file, one without rows or without the column
    ``prompt_key``, and for files whose columns have incompatible types.
    """
    names = [str(name) for name in ([files] if isinstance(files, str | Path) else files)]
    if not names:
        raise DataError("no data file was given: expected one parquet file or a list of them")
    paths, tables = [], []
    for name in names:
        paths.append(path := local_path(name, cache_dir))
        require_file(path, name)
        with _reading(name):
            tables.append(pq.read_table(path))
            found = tables[-1].column_names
            _require_names(tables[-1].schema)
        require_readable(name, tables[-1])
        if prompt_key not in found:
            raise DataError(f"{name}: there is no column {prompt_key!r} (data.prompt_key); found {found}")
        if not len(tables[-1]):
            raise DataError(f"{name}: the file has no rows")
    try:
        whole = pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise DataError(
            f"the columns of {', '.join(names)} have types that cannot be joined: {error}"
        ) from error
    starts = itertools.accumulate((table.num_rows for table in tables[:-1]), initial=0)
    return PromptTable(whole, tuple(names), tuple(paths), tuple(starts))


def require_file(path: Path, name: str) -> None:
    """Raise :class:`DataError` unless ``path`` is a regular file: the first read of a pipe never returns."""
    if not path.is_file():
        found = "a folder" if path.is_dir() else "no regular file" if path.exists() else "nothing"
        raise DataError(f"{name}: expected a data file, found {found} (looked at {path.absolute()})")


@contextmanager
def _reading(name: str) -> Generator[None]:
    """Turn read errors of the body into a :class:`DataError` about the file ``name``."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: names of columns
        raise DataError(f"{name}: cannot be read as parquet: {error}") from error


def _require_names(fields: Iterable[pa.Field]) -> None:
    """Raise ``UnicodeDecodeError`` for a name, also of a nested field, that is not UTF-8."""
    for field in fields:
        _ = field.name
        _require_names(field.type.field(number) for number in range(field.type.num_fields))


_MAY_NOT_CONVERT = re.compile("timestamp|date|time|duration")  # nanoseconds, years after 9999


def require_readable(name: str, table: pa.Table, *, first_row: int = 0) -> None:
    """Raise :class:`DataError` for the first value that is no plain Python value, such as text not in UTF-8.

    ``name`` is the file's, ``first_row`` the number in it of the table's first row.
    """
    for column, values in zip(table.column_names, table.columns, strict=True):
        try:
            values.validate(full=True)
            if not _MAY_NOT_CONVERT.search(str(values.type)):
                continue
        except pa.ArrowInvalid:
            pass
        for row, value in enumerate(values, first_row):
            try:
                value.as_py()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{name}, row {row}, field {column}: text that is not UTF-8: {error}"
                ) from error
            except (ValueError, OverflowError, pa.ArrowException) as error:
                raise DataError(
                    f"{name}, row {row}, field {column}: a value cannot be read: {error}"
                ) from error


UNNAMED_SOURCE = "unnamed"
"""Data source of rows whose files lack the column; only a custom reward function can score them."""
# Columns that strop adds to batches; columns of a file with these names would be silently overwritten.
_RESERVED = ("input_ids", "attention_mask", "position_ids", "raw_prompt", "raw_prompt_ids", "uid", "seeds")
_TARGET = "reward_model"
_ROW = "row number"


def check_columns(table: PromptTable, prompt_key: str, reward_fn_key: str) -> None:
    """Reject reserved column names, and columns of types that rewards cannot use."""
    clashes = [name for name in _RESERVED if name in table.names and name != prompt_key]
    if clashes:
        raise DataError(
            f"{', '.join(table.files)}: the columns {clashes} have names that batches use; rename them"
        )
    _check_column(table, reward_fn_key, "a string", _is_string)
    _check_column(table, _TARGET, "a record {style, ground_truth}", pa.types.is_struct)
    _check_column(table, "extra_info", "a record or null", pa.types.is_struct, nulls=True)


def require_ground_truths(
    table: PromptTable, reward_fn_key: str, sources: Collection[str], *, by_model: bool
) -> None:
    """Require ``reward_model.ground_truth``, which built-in scorers compare with, in rows of ``sources``.

    With ``by_model``, rows for the reward model (``reward_model.style`` is "model") need none.

    Raises :class:`DataError` naming file, row and field of the first row without a ground truth.
    """
    if not sources or reward_fn_key not in table.names:
        return
    columns = {name: table.table.column(name) for name in (reward_fn_key, _TARGET) if name in table.names}
    columns[reward_fn_key] = columns[reward_fn_key].cast(pa.large_string())
    columns[_ROW] = pa.array(np.arange(len(table)))
    rows = pa.table(columns).filter(pc.field(reward_fn_key).isin(sorted(sources)))
    if not rows:
        return
    if _TARGET not in table.names:
        raise DataError(
            f"{table.files[0]}: there is no column {_TARGET!r}; found {table.names}. Expected a record "
            "{style, ground_truth}: " + _who_needs_it(sources)
        )
    fields = {field.name for field in rows.schema.field(_TARGET).type}
    problem = f"found only the fields {sorted(fields)}"
    if "ground_truth" in fields:
        problem = "found null or NaN"
        rows = rows.filter(pc.field(_TARGET, "ground_truth").is_null(nan_is_null=True))
    if by_model and "style" in fields:
        style = pc.field(_TARGET, "style")
        rows = rows.filter(style.is_null() | (style != "model"))
    if rows:
        source = rows[reward_fn_key][0].as_py()
        raise table.error(
            rows[_ROW][0].as_py(),
            f"{_TARGET}.ground_truth",
            f"{problem}, expected the answer: {_who_needs_it([source])}",
        )


def _is_string(kind: pa.DataType) -> bool:
    """Return True for text columns."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _who_needs_it(sources: Collection[str]) -> str:
    return f"the built-in scorer of data_source {', '.join(map(repr, sorted(sources)))} compares with it"


def _check_column(
    table: PromptTable, name: str, expected: str, fits: Callable[[pa.DataType], bool], nulls: bool = False
) -> None:
    """Check type and nulls of a column; Arrow gives all rows one type, so the first value is an example."""
    if name not in table.names:
        return
    column = table.table.column(name)
    if column.null_count and not nulls:
        row = pc.index(column.is_null(), True).as_py()
        raise table.error(row, name, f"expected {expected}, found null")
    if not fits(column.type) and column.null_count < len(column):
        row = pc.index(column.is_valid(), True).as_py()
        value = column[row].as_py()
        raise table.error(row, name, f"expected {expected}, found {type(value).__name__} {value!r:.60}")
