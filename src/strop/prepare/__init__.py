"""``strop prepare``: convert public data sets to the parquet files that strop trains on. Imports no torch.

Files for ``strop train`` have the columns ``data_source`` (str, selects the scorer), ``prompt`` (list of chat
messages), ``ability`` (str), ``reward_model`` {style, ground_truth} and ``extra_info`` {split, index, ...},
with the same types in every data set.

A data set is one function, ``(source, **options) -> {split: Split}``; :data:`DATASETS` names it.
"""

from __future__ import annotations

import inspect
import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from strop.config.backends import load_backend
from strop.config.paths import expand, is_url
from strop.data.fetch import progress_bar
from strop.data.records import exact_name, table_of, visible_names
from strop.errors import DataError
from strop.files import atomic_path, atomic_write_text
from strop.prepare.source import Split

logger = logging.getLogger("strop.data")

DATASETS = {
    "arithmetic": "strop.prepare.arithmetic:splits",
    "full_hh_rlhf": "strop.prepare.full_hh_rlhf:splits",
    "gsm8k": "strop.prepare.maths:gsm8k_splits",
    "hellaswag": "strop.prepare.hellaswag:splits",
    "humaneval": "strop.prepare.code:humaneval_splits",
    "math": "strop.prepare.maths:math_splits",
    "mbpp": "strop.prepare.code:mbpp_splits",
    "table": "strop.prepare.table:splits",
}

_REASONS_SHOWN = 5


class Prepared(NamedTuple):
    """One written file."""

    path: Path
    rows: int


def prepare(name: str, source: str | Path | None, out_dir: str | Path, **options: Any) -> dict[str, Prepared]:
    """Write ``out_dir/<split>.parquet`` for every split that ``source`` has.

    ``source``: a file or folder of parquet, JSONL (also .gz), JSON or CSV, an fsspec URL of one, a folder of
    ``save_to_disk``, a hub name for the package ``datasets``, or None for the data set's hub name.
    ``options`` are those of the data set's function.

    A folder that is source and target at once may not have a file with the name of one that is written.

    Skips unusable records: a warning has their number, ``out_dir/<split>.rejected.jsonl`` their reasons.

    Raises:
        DataError: an unknown data set or option, an unusable source, a split without a usable record, a file
            of the source that would be replaced, or a file with other columns in its place.
    """
    if is_url(out_dir):
        raise DataError(f"{out_dir}: files are prepared in a folder of this machine; name one, and copy it")
    splits = _function(name, options)(source, **options)
    folder = Path(expand(out_dir))
    if source is not None and not is_url(source):
        _require_apart(Path(expand(source)), folder, splits)
    return {split: _write_split(folder, split, records) for split, records in splits.items()}


def _function(name: str, options: Mapping[str, Any]) -> Callable[..., dict[str, Split]]:
    if name not in DATASETS:
        raise DataError(f"unknown data set {name!r}: expected one of {', '.join(sorted(DATASETS))}")
    function = load_backend(DATASETS[name])
    known = [option for option in inspect.signature(function).parameters if option != "source"]
    unknown = [option for option in options if option not in known]
    if unknown:
        raise DataError(f"{name} has no option {', '.join(unknown)}; it has: {', '.join(known) or 'none'}")
    return function


def _require_apart(source: Path, folder: Path, splits: Iterable[str]) -> None:
    """Raise :class:`DataError` if ``source``, a file or folder, has a file that is written."""
    for path in (folder / f"{split}.parquet" for split in splits):
        if path.exists() and source.resolve() in (path.resolve(), path.parent.resolve()):
            raise DataError(
                f"{path} belongs to --source {source} and would be replaced: choose another folder for "
                "--out, or remove that file if an earlier run wrote it"
            )


def _write_split(folder: Path, split: str, records: Split) -> Prepared:
    rows: list[dict[str, Any]] = []
    rejected: list[dict[str, Any]] = []
    path = folder / f"{split}.parquet"
    with progress_bar(f"preparing {split}", len(records.records)) as advance:
        for index, record in enumerate(records.records):
            try:
                rows.append(records.convert(record, split, index))
            except DataError as error:
                rejected.append({"row": index, "reason": str(error)})
            advance(1)
    # before anything is written: sft, rm and rl files of one data set have the same names
    _require_same_columns(path, list(dict.fromkeys(itertools.chain(*rows))))
    _report(folder / f"{split}.rejected.jsonl", split, rejected, len(records.records))
    if not rows:
        reason = f"; row {rejected[0]['row']}: {rejected[0]['reason']}" if rejected else ""
        raise DataError(f"split {split}: none of {len(records.records)} records can be used{reason}")
    with atomic_path(path) as temporary:
        # readers compare them: a flipped bit in a text would be trained on
        pq.write_table(_storable(f"split {split}", rows), temporary, write_page_checksum=True)
    return Prepared(path, len(rows))


def _storable(name: str, rows: list[dict[str, Any]]) -> pa.Table:
    """Return a table for parquet, in which chats and tools that parquet would change are JSON text.

    Values of several types are JSON texts by type, as the package datasets writes them.
    """
    table = table_of(name, rows)
    for column in visible_names(table.column_names):
        number = table.column_names.index(column)
        kind, has_exact = table.schema.types[number], exact_name(column) in table.column_names
        if has_exact and pa.types.is_string(kind):
            table = table.set_column(number, column, table.column(column).cast(pa.json_()))
            continue
        if has_exact and pa.types.is_struct(kind) and "struct<>" not in str(kind):
            given = [row.get(column) for row in rows]
            table = table.set_column(number, column, _with_json(table.column(column).combine_chunks(), given))
            continue
        is_changed = has_exact and column in ("prompt", "tools")
        if is_changed or "struct<>" in str(kind):  # parquet has no empty records
            texts = [None if row.get(column) is None else json.dumps(row[column]) for row in rows]
            table = table.set_column(number, column, pa.array(texts, pa.string()))
    return table.select(visible_names(table.column_names))


def _with_json(values: pa.Array, given: Sequence[Any]) -> pa.Array:
    """Return a column of records whose JSON texts, made of the fields of ``given``, have the type of such."""
    kind = values.type
    if pa.types.is_string(kind) and any(isinstance(one, list | dict) for one in given):
        return values.cast(pa.json_())
    if not pa.types.is_struct(kind):
        return values
    fields = [[None if one is None else one.get(field.name) for one in given] for field in kind]
    parts = [_with_json(*both) for both in zip(values.flatten(), fields, strict=True)]
    return pa.StructArray.from_arrays(parts, [field.name for field in kind], mask=values.is_null())


def _require_same_columns(path: Path, columns: list[str]) -> None:
    """Raise :class:`DataError` if ``path`` is a file with other columns, so for another use."""
    if not columns or not path.exists():
        return
    try:
        there = pq.read_schema(path).names
    except (pa.ArrowException, OSError):  # not a usable file: replace it
        return
    if set(there) != set(columns):
        raise DataError(
            f"{path} exists, with the columns {', '.join(there)}; the new file would have the columns "
            f"{', '.join(columns)}: choose another folder, or remove that file"
        )


def _report(path: Path, split: str, rejected: list[dict[str, Any]], total: int) -> None:
    """Log and list the skipped records; remove an outdated list of an earlier run."""
    if not rejected:
        path.unlink(missing_ok=True)
        return
    atomic_write_text(path, "".join(json.dumps(entry) + "\n" for entry in rejected))
    reasons = Counter(entry["reason"] for entry in rejected)
    # reversed, so that the first row of a reason is written last and stays
    first_rows = {entry["reason"]: entry["row"] for entry in reversed(rejected)}
    shown = [
        f"{count} times, first in row {first_rows[reason]}: {reason}"
        for reason, count in reasons.most_common(_REASONS_SHOWN)
    ]
    if len(reasons) > _REASONS_SHOWN:
        shown.append(f"and {len(reasons) - _REASONS_SHOWN} other reasons")
    logger.warning(
        "split %s: skipped %d of %d records (listed in %s). %s",
        split, len(rejected), total, path, "; ".join(shown),
    )  # fmt: skip
