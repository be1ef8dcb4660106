"""Prompt files: parquet in, checked rows out. Rows count from 0 in every message.

``count_rows`` reads metadata only, and nothing here imports torch: ``strop check`` uses this module.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from strop.config.paths import is_url
from strop.data.files import local_path, open_filesystem
from strop.errors import DataError

Files = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class PromptTable:
    """The rows of one or several files, in order.

    ``files`` are the names as the user wrote them, ``paths`` their local copies, ``starts`` the number of
    each file's first row in ``table``, ``columns`` what each has (``table`` may hold a part of them).
    """

    table: pa.Table
    files: tuple[str, ...]
    paths: tuple[Path, ...]
    starts: tuple[int, ...]
    columns: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return self.table.num_rows

    @property
    def names(self) -> list[str]:
        """The columns that any of the files has."""
        return list(dict.fromkeys(itertools.chain.from_iterable(self.columns)))

    def files_without(self, column: str) -> list[str]:
        """The files that have no such column."""
        return [name for name, columns in zip(self.files, self.columns, strict=True) if column not in columns]

    def locate(self, row: int) -> tuple[str, int]:
        """The file that row ``row`` of the whole came from, and its number there."""
        which = bisect_right(self.starts, row) - 1
        return self.files[which], row - self.starts[which]

    def error(self, row: int, field: str, problem: str) -> DataError:
        """An error that names file, row and field."""
        name, row_in_file = self.locate(row)
        return DataError(f"{name}, row {row_in_file}, field {field}: {problem}")

    def values(self, column: str, start: int, stop: int) -> list[Any]:
        """Rows ``start`` to ``stop`` of a column as plain Python values (dict, list, str, numbers, None)."""
        return self.table.column(column).slice(start, stop - start).to_pylist()

    def row(self, row: int) -> dict[str, Any]:
        """One row as plain Python values."""
        return self.table.slice(row, 1).to_pylist()[0]


def list_files(files: Files) -> list[str]:
    """One name or many -> a list of names; :class:`DataError` when there is none."""
    names = [str(files)] if isinstance(files, str | Path) else [str(name) for name in files]
    if not names:
        raise DataError("no data file was given: expected one parquet file or a list of them")
    return names


def count_rows(files: Files) -> int:
    """The number of rows of all files, from their footers; a URL is not downloaded for it."""
    return sum(_open_metadata(name).num_rows for name in list_files(files))


def read_prompt_table(
    files: Files, *, prompt_key: str = "prompt", cache_dir: str | Path | None = None
) -> PromptTable:
    """Read all files into one table.

    Raises :class:`DataError` for a missing or unreadable file, one without rows, one without the column
    ``prompt_key``, and for files whose columns do not fit together.
    """
    names = list_files(files)
    paths = [_existing(name, local_path(name, cache_dir)) for name in names]
    tables = [_read_one(name, path, prompt_key) for name, path in zip(names, paths, strict=True)]
    return _joined(names, paths, tables, [table.column_names for table in tables])


def read_part_of_prompt_table(
    files: Files, *, prompt_key: str, wanted: Callable[[pq.ParquetFile], Collection[str]]
) -> PromptTable:
    """The columns of local files that are ``wanted`` of any of them: the others are known by name only.

    Raises :class:`DataError` as ``read_prompt_table``.
    """
    names = list_files(files)
    paths = [_existing(name, local_path(name)) for name in names]
    opened = [_open(name, path) for name, path in zip(names, paths, strict=True)]
    columns = [file.schema_arrow.names for file in opened]
    for name, file, own in zip(names, opened, columns, strict=True):
        _require_prompts(name, own, file.metadata.num_rows, prompt_key)
    read = set(itertools.chain.from_iterable(wanted(file) for file in opened))
    tables = [
        _read_columns(name, file, sorted(read & set(own)))
        for name, file, own in zip(names, opened, columns, strict=True)
    ]
    return _joined(names, paths, tables, columns)


def _joined(
    names: Sequence[str], paths: Sequence[Path], tables: Sequence[pa.Table], columns: Sequence[Sequence[str]]
) -> PromptTable:
    try:
        whole = pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise DataError(
            f"the columns of {', '.join(names)} have types that cannot be joined: {error}"
        ) from error
    starts = itertools.accumulate((table.num_rows for table in tables[:-1]), initial=0)
    return PromptTable(whole, tuple(names), tuple(paths), tuple(starts), tuple(map(tuple, columns)))


@contextmanager
def _reading(name: str) -> Generator[None]:
    """What goes wrong in here is a :class:`DataError` about the file that the user calls ``name``."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{name}: cannot be read as parquet: {error}") from error


def _open(name: str, path: Path) -> pq.ParquetFile:
    with _reading(name):
        return pq.ParquetFile(path)


def _read_columns(name: str, file: pq.ParquetFile, columns: list[str]) -> pa.Table:
    with _reading(name):
        return file.read(columns=columns)


def _existing(name: str, path: Path) -> Path:
    if path.is_file():
        return path
    found = "a folder" if path.is_dir() else "nothing"
    raise DataError(f"{name}: expected a parquet file, found {found} (looked at {path.absolute()})")


def _read_one(name: str, path: Path, prompt_key: str) -> pa.Table:
    with _reading(name):
        table = pq.read_table(path)
    _require_prompts(name, table.column_names, table.num_rows, prompt_key)
    return table


def _require_prompts(name: str, columns: Sequence[str], rows: int, prompt_key: str) -> None:
    if prompt_key not in columns:
        raise DataError(f"{name}: there is no column {prompt_key!r} (data.prompt_key); found {list(columns)}")
    if rows == 0:
        raise DataError(f"{name}: the file has no rows")


def _open_metadata(name: str) -> pq.FileMetaData:
    with _reading(name):
        try:
            if not is_url(name):
                return pq.read_metadata(_existing(name, local_path(name)))
            fs, remote = open_filesystem(name)
            with fs.open(remote, "rb") as handle:
                return pq.read_metadata(handle)
        except FileNotFoundError as error:
            raise DataError(f"{name}: no such file") from error
