"""Records (dicts) as an Arrow table, and the records of JSON files. Nothing here imports torch."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from strop.errors import DataError, raised_as

CHUNK_ROWS = 50_000
"""Records that are Python objects at one time."""

Located = tuple[str, Any]
"""A record, and its place in its source in words."""


def json_records(name: str, path: Path) -> Iterator[Located]:
    """Yield the records of JSON lines, or of one JSON list in a file of another name."""
    with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as lines:
        beginning = lines.read(1024).removeprefix(b"\xef\xbb\xbf")  # editors on Windows write a mark
        lines.seek(0)
        if ".jsonl" not in path.name and beginning.lstrip().startswith(b"["):
            yield from _json_list(name, lines.read())
            return
        for number, data in enumerate(lines, 1):
            line = data.decode("utf-8").lstrip("\ufeff").strip()
            if not line:
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # numbers of 4,300 digits, too
                whole = "" if ".jsonl" in path.name else " (expected a list of objects, or one on each line)"
                raise DataError(f"{name}, line {number}: not JSON: {error}{whole}") from error
            if not isinstance(record, dict):
                raise DataError(f"{name}, line {number}: expected an object, found {line:.60}")
            yield f"line {number}", record


def _json_list(name: str, data: bytes) -> Iterator[Located]:
    with raised_as(DataError, f"{name}: not JSON", ValueError, RecursionError):
        records = json.loads(data.decode("utf-8-sig"))
    for number, record in enumerate(records):
        if not isinstance(record, dict):
            raise DataError(f"{name}, record {number}: expected an object, found {record!r:.60}")
        yield f"record {number}", record


def records_table(name: str, records: Callable[[], Iterable[Located]], texts: Collection[str]) -> pa.Table:
    """Return records as a table; ``records`` is called again for columns with values of several types."""
    wanted = _tree([*((text,) for text in texts), *(tuple(text.split(".")) for text in texts)])
    try:
        return _joined(_tables(name, records(), wanted))
    except (pa.ArrowException, OverflowError) as error:
        mixed = _mixed(name, records())
        if not mixed:
            raise DataError(f"{name}: the rows have values that do not fit together: {error}") from error
        return _joined(_tables(name, records(), _tree(mixed, wanted)))


def table_of(name: str, rows: Sequence[Any], texts: Collection[str] = ()) -> pa.Table:
    """Return a sequence of dicts as a table with the columns of all; see ``read_table`` about ``texts``."""
    return records_table(name, lambda: ((f"row {number}", row) for number, row in enumerate(rows)), texts)


def _joined(tables: Iterable[pa.Table]) -> pa.Table:
    # the empty one: concat_tables of no table raises
    return pa.concat_tables([pa.table({}), *tables], promote_options="permissive")


Tree = dict[Any, Any]
"""Name of a field (None: the items of a list) -> the tree below it; an empty tree: values become text."""


def _tree(paths: Iterable[tuple[Any, ...]], onto: Tree | None = None) -> Tree:
    tree = onto or {}
    for path in paths:
        node = tree
        for name in path:
            node = node.setdefault(name, {})
    return tree


def _tables(name: str, records: Iterable[Located], tree: Tree) -> Iterator[pa.Table]:
    remaining = iter(records)
    while chunk := list(itertools.islice(remaining, CHUNK_ROWS)):
        for place, record in chunk:
            if not isinstance(record, Mapping):
                raise DataError(f"{name}, {place}: expected a dict, found {record!r:.60}")
        rows = [_with_text(record, tree) for _, record in chunk] if tree else [row for _, row in chunk]
        columns = dict.fromkeys(key for row in rows for key in row)
        try:
            yield pa.table({column: pa.array([row.get(column) for row in rows]) for column in columns})
        except UnicodeEncodeError as error:
            place = next(place for place, row in chunk if error.object in _all_texts(row))
            raise DataError(f"{name}, {place}: a text is not Unicode (a lone surrogate)") from error


def _with_text(value: Any, tree: Tree) -> Any:
    """Return ``value`` with numbers and truth values as text where ``tree`` marks them."""
    if not tree:
        return value if isinstance(value, Mapping | list | tuple) else as_text(value)
    if isinstance(value, Mapping):
        return {**value, **{name: _with_text(value[name], tree[name]) for name in tree if name in value}}
    return [_with_text(item, tree[None]) for item in value] if isinstance(value, list) else value


def as_text(value: Any) -> str | None:
    """Return a value as Arrow writes it: 42 for 42 and 42.0, true for True."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)  # of any size
    return None if value != value else pa.scalar(value).cast(pa.string()).as_py()


def _mixed(name: str, records: Iterable[Located]) -> list[tuple[Any, ...]]:
    """Return the paths of values of several types that can all be text; raise ``DataError`` for others."""
    kinds: dict[tuple[Any, ...], dict[str, str]] = {}

    def note(value: Any, path: tuple[Any, ...], place: str) -> None:
        if value is None or value != value:  # NaN: null
            return
        kind = "text" if isinstance(value, str) else type(value).__name__
        if isinstance(value, Mapping):
            kind = "object"
            for key, item in value.items():
                note(item, (*path, key), place)
        elif isinstance(value, list | tuple):
            kind = "list"
            for item in value:
                note(item, (*path, None), place)
        # float64, which Arrow makes of mixed numbers, cannot hold it
        elif isinstance(value, int) and abs(value) >= 2**53:
            kind = "large number"
        elif isinstance(value, int | float) and not isinstance(value, bool):
            kind = "number"
        kinds.setdefault(path, {}).setdefault(kind, place)

    for place, record in records:
        for key, value in record.items():
            note(value, (key,), place)
    mixed = {path: found for path, found in kinds.items() if len(found) > 1 or "large number" in found}
    for path, found in mixed.items():
        if {"object", "list"} & found.keys():
            words = ", ".join(f"{kind} in {place}" for kind, place in found.items())
            field = ".".join("[]" if key is None else str(key) for key in path)
            raise DataError(f"{name}, field {field}: the values are of several types: {words}")
    return list(mixed)


def _all_texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _all_texts(item)
