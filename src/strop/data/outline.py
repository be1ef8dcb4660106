"""Rows and columns of the data files of a run, read before anything that takes seconds is imported.

What this finds, building the data sets would find later, and one problem at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from strop.config.paths import expand, is_rows, is_url, with_split
from strop.config.schema import RootConfig
from strop.data.prompt_table import require_columns
from strop.data.sources import (
    JSON,
    Rows,
    Source,
    is_parquet,
    read_table,
    reading,
    require_own_names,
    sources,
)
from strop.errors import Attempts, StropError


@dataclass(frozen=True)
class Outline:
    """Known facts about the data files of a run."""

    train_rows: int | None
    """Rows of the training files; None if one of them is not on this machine, or cannot be read."""
    errors: list[StropError]
    """A file that cannot be read, or that lacks columns."""


def outline(config: RootConfig, rows: Sequence[Rows] = ()) -> Outline:
    """Look at the local files of a run, and at ``rows`` in memory; those of URLs and the hub are left out."""
    data, attempt = config.data, Attempts()
    train_rows: int | None = 0
    names = {
        key.removesuffix("_key"): column
        for key, column in data
        if key.endswith("_key")
        and key not in ("reward_fn_key", "tools_key", "image_key")
        and column is not None
    }
    trained = [] if config.trainer.val_only else sources(data.train_files, rows)
    for number, source in enumerate([*trained, *sources(data.val_files, rows)]):
        found = attempt(lambda source=source: _columns_and_rows(source, names))
        columns, count = found or (None, None)
        if columns is not None:
            attempt(lambda source=source, columns=columns: require_columns(str(source), columns, names))
        if number < len(trained):
            train_rows = None if count is None or train_rows is None else train_rows + count
    return Outline(train_rows or None, attempt.errors)


def _columns_and_rows(source: Source, names: dict[str, str]) -> tuple[pa.Table, int] | None:
    """Return a table with the columns of a source, and its number of rows; None if it is not here."""
    name = str(source)
    if not isinstance(source, Rows):
        paths = [name, *(with_split(name) or ())[:1]]
        if is_rows(name) or is_url(name) or not any(Path(expand(path)).exists() for path in paths):
            return None
        if is_parquet(name):
            with reading(name):
                file = pq.ParquetFile(expand(name))
                require_own_names(name, file.schema_arrow.names)
                if JSON not in str(file.schema_arrow.types):  # types of values are in their texts
                    return file.schema_arrow.empty_table(), file.metadata.num_rows
    table = read_table(source, texts=list(names.values()))
    return table, len(table)
