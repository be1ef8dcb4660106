"""Records (dicts) as an Arrow table and back, and the records of JSON files. Nothing here imports torch.

Arrow gives every record of a column the keys, types and key order of all. Where that changes a record, its
JSON is kept in a second column, which only ``to_rows`` reads.
"""

from __future__ import annotations

import copy
import gzip
import io
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from strop.data.pictures.read import COLUMNS, storable
from strop.errors import DataError, raised_as

CHUNK_ROWS = 50_000
"""Records that are Python objects at one time."""

Located = tuple[str, Any]
"""A record, and its place in its source in words."""

_EXACT = "\0exact"
_TRUTH = ("reward_model", "ground_truth")
_BY_TYPE = (*COLUMNS, "data_source", "reward_model", "extra_info", "environment", "tools")
"""Columns whose type says what they are, so that their values cannot be of several."""


def exact_name(column: str) -> str:
    """Return the name of the column with the JSON of records in ``column`` that Arrow changes; else null."""
    return f"{column}{_EXACT}"


def visible_names(names: Iterable[str]) -> list[str]:
    """Return the names of columns without those of ``exact_name``."""
    return [name for name in names if not name.endswith(_EXACT)]


def to_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Return rows as plain Python values, in which nested records have the keys that they were read with.

    Sources with types of their own (parquet, data sets, frames) have a null for a key that only other records
    have, so there a key of a nested record without a value is left out, but for those of ``reward_model``.
    """
    rows = table.to_pylist()
    nested = [field.name for field in table.schema if pa.types.is_nested(field.type)]
    exact = [name for name in table.column_names if name.endswith(_EXACT)]
    for row in rows:
        for name in nested:
            row[name] = _own(name, row[name])
        for name in exact:
            if (text := row.pop(name)) is not None:
                row[name.removesuffix(_EXACT)] = json.loads(text)
    return rows


def _own(column: str, value: Any) -> Any:
    """Return a value of an Arrow column without the keys that are null in it."""
    own = _without_nulls(value)
    if column == _TRUTH[0] and isinstance(value, dict):  # verl's managers read them by key
        return {key: value[key] for key in ("style", _TRUTH[1]) if key in value} | own
    return own


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {"content"} if "role" in value else ()  # null in a message that only calls tools
        return {key: _without_nulls(item) for key, item in value.items() if item is not None or key in kept}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _exact(name: str, values: Sequence[Any], column: pa.Array) -> pa.Array | None:
    """Return the JSON of the values that ``column`` holds with other keys or types; None if it has all."""
    arrow = column.to_pylist()
    whole = repr(values)  # equal values may have other types and another order of keys
    if whole == repr(arrow) and ": None" not in whole:
        return None
    found = []
    for value, read in zip(values, arrow, strict=True):
        try:
            text = json.dumps(value)
        except TypeError:  # of Python, such as a date: as Arrow has it
            text = None
        found.append(None if text is None or text == json.dumps(_own(name, read)) else text)
    return None if found.count(None) == len(found) else pa.array(found, pa.string())


_USUAL_EXPANSION, _ANY_EXPANSION = 100, 256 * 2**20


class _Expanding(io.RawIOBase):
    """The content of a compressed file; ``DataError`` once it is far larger than texts are."""

    def __init__(self, path: Path) -> None:
        self._path, self._size = path, 0
        self._content = gzip.open(path)  # noqa: SIM115
        self._most = max(_USUAL_EXPANSION * path.stat().st_size, _ANY_EXPANSION)

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._content.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        count = self._content.readinto(buffer)
        self._size += count
        if self._size > self._most:
            raise DataError(
                f"{self._path}: it expands to more than {self._most / 2**20:,.0f} MiB, over "
                f"{_USUAL_EXPANSION} times its size, and may fill the memory; if it is right, unpack it first"
            )
        return count


def open_data(path: Path) -> io.BufferedReader:
    """Open a data file to read its bytes, which may be compressed."""
    return io.BufferedReader(_Expanding(path), 2**20) if is_compressed(path) else path.open("rb")


def is_compressed(path: Path) -> bool:
    """Return True for a file of gzip by its name, which a query may follow as in URLs."""
    return path.name.partition("?")[0].lower().endswith(".gz")


def json_records(name: str, path: Path) -> Iterator[Located]:
    """Yield the records of JSON lines, or of one JSON list in a file of another name."""
    are_lines = ".jsonl" in path.name.lower()
    with open_data(path) as lines:
        beginning = lines.peek(1024).removeprefix(b"\xef\xbb\xbf")  # editors on Windows write a mark
        if not are_lines and beginning.lstrip().startswith(b"["):
            yield from _json_list(name, lines.read())
            return
        n_records, record = 0, {}
        for number, data in enumerate(lines, 1):
            line = data.decode("utf-8").lstrip("\ufeff").strip()
            if not line:
                continue
            if line == "{":
                raise DataError(f"{name}, line {number}: found an object over several lines, {_NO_ROWS}")
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # numbers of 4,300 digits, too
                form = "one object, no comma" if are_lines else "a list of objects, or one a line"
                raise DataError(f"{name}, line {number}: not JSON: {error} (expected {form})") from error
            if not isinstance(record, dict):
                raise DataError(f"{name}, line {number}: expected an object, found {line:.60}")
            n_records += 1
            yield f"line {number}", record
        if n_records == 1 and not are_lines and not any(map(_is_of_a_row, record.values())):
            raise DataError(f"{name}: found one object with {', '.join(record):.80}, {_NO_ROWS}")


def _is_of_a_row(value: Any) -> bool:
    """Return False for what holds rows: the list below a key such as "data", or a whole column."""
    is_chat = isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]
    return is_chat or not isinstance(value, dict | list)


_NO_ROWS = (
    "expected a list of objects, or one object a line. Write the list below a key alone; pandas writes rows "
    "with to_json(FILE, orient='records')"
)


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
    with raised_as(DataError, f"{name}: values are nested too deep", RecursionError):
        try:
            return _joined(_tables(name, records(), wanted))
        except (pa.ArrowException, OverflowError, UnicodeDecodeError) as error:  # the last: of bytes as text

            def stored() -> Iterator[Located]:
                return ((place, storable(record, f"{name}, {place}", texts)) for place, record in records())

            mixed, as_json = _mixed(name, stored(), {*wanted, *_BY_TYPE})
            answers = _tree([path for path in mixed if path == _TRUTH], copy.deepcopy(wanted))
            try:
                return _joined(_tables(name, stored(), _tree(mixed, wanted, as_json), answers))
            except (pa.ArrowException, OverflowError):
                raise DataError(
                    f"{name}: the rows have values that do not fit together: {error!s:.200}"
                ) from error


def table_of(name: str, rows: Sequence[Any], texts: Collection[str] = ()) -> pa.Table:
    """Return a sequence of dicts as a table with the columns of all; see ``read_table`` about ``texts``."""
    return records_table(name, lambda: ((f"row {number}", row) for number, row in enumerate(rows)), texts)


def _joined(tables: Iterable[pa.Table]) -> pa.Table:
    # the empty one: concat_tables of no table raises
    return pa.concat_tables([pa.table({}), *tables], promote_options="permissive")


Tree = dict[Any, Any]
"""Name of a field (None: the items of a list) -> the tree below it.

An empty tree: numbers become text; None: any value becomes JSON.
"""
Place = tuple[Any, ...]


def _tree(paths: Iterable[Place], onto: Tree | None = None, as_json: Iterable[Place] = ()) -> Tree:
    tree = onto or {}
    for path in paths:
        node = tree
        for name in path:
            node = node.setdefault(name, {})
    for *above, last in sorted(as_json, key=len):
        node = tree
        for name in above:
            node = {} if node is None else node.setdefault(name, {})
        if node is not None:
            node[last] = None
    return tree


def _tables(
    name: str, records: Iterable[Located], tree: Tree, answers: Tree | None = None
) -> Iterator[pa.Table]:
    """Yield tables in which ``tree`` marks what is text, and ``answers`` what is text for ``to_rows``."""
    remaining = iter(records)
    while chunk := list(itertools.islice(remaining, CHUNK_ROWS)):
        for place, record in chunk:
            if not isinstance(record, Mapping):
                raise DataError(f"{name}, {place}: expected a dict, found {record!r:.60}")
        rows = [_with_text(record, tree) for _, record in chunk]
        own = rows if answers is None else [_with_text(record, answers) for _, record in chunk]
        columns = dict.fromkeys(key for row in rows for key in row)
        if not all(isinstance(column, str) for column in columns):  # numbers, of tables without a header
            rows, own = ([{str(key): row[key] for key in row} for row in part] for part in (rows, own))
            columns = dict.fromkeys(map(str, columns))
        made: dict[str, pa.Array] = {}
        try:
            for column in columns:
                made[column] = pa.array([row.get(column) for row in rows])
                kind = made[column].type
                if tree.get(column, {}) is None:
                    made[exact_name(column)] = made[column]
                if "binary" in str(kind) and any(_are_bytes(row.get(column), kind) for row in rows):
                    raise pa.ArrowInvalid(f"the column {column} has bytes and texts")
                if pa.types.is_nested(kind):
                    exact = _exact(column, [row.get(column) for row in own], made[column])
                    made |= {} if exact is None else {exact_name(column): exact}
        except UnicodeEncodeError as error:
            place = next(place for place, row in chunk if error.object in _all_texts(row))
            raise DataError(f"{name}, {place}: a text is not Unicode (a lone surrogate)") from error
        yield pa.table(made)


def _are_bytes(value: Any, kind: pa.DataType) -> bool:
    """Return True if Arrow, with this type, makes bytes of a text in ``value``."""
    if value is not None and pa.types.is_list(kind):
        return any(_are_bytes(item, kind.value_type) for item in value)
    if value is not None and pa.types.is_struct(kind):
        return any(_are_bytes(value.get(field.name), field.type) for field in kind)
    return pa.types.is_binary(kind) and isinstance(value, str)


def _with_text(value: Any, tree: Tree | None) -> Any:
    """Return ``value`` with numbers and truth values as text, and others as JSON, where ``tree`` says so."""
    if tree is None:
        return None if value is None else json.dumps(value, default=str)
    if not tree:
        return value if isinstance(value, Mapping | list | tuple) else as_text(value)
    if isinstance(value, Mapping):
        return {**value, **{name: _with_text(value[name], tree[name]) for name in tree if name in value}}
    return [_with_text(item, tree.get(None, {})) for item in value] if isinstance(value, list) else value


def as_text(value: Any) -> str | None:
    """Return a value as Arrow writes it: 42 for 42 and 42.0, true for True."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)  # of any size
    return None if _is_missing(value) else pa.scalar(value).cast(pa.string()).as_py()


def _is_missing(value: Any) -> bool:
    """Return True for None, and for NaN, which Arrow reads as null."""
    try:
        return value is None or bool(value != value)
    except (TypeError, ValueError, RuntimeError):  # tensors, pandas.NA
        return False


def _mixed(
    name: str, records: Iterable[Located], by_type: Collection[str]
) -> tuple[list[Place], list[Place]]:
    """Return the paths of values of several types that can all be text, and those that can only be JSON.

    Raises ``DataError`` for one of the latter that is a column in ``by_type``.
    """
    kinds: dict[tuple[Any, ...], dict[str, str]] = {}

    def note(value: Any, path: tuple[Any, ...], place: str) -> None:
        if _is_missing(value):
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
    as_json = [path for path, found in mixed.items() if {"object", "list"} & found.keys()]
    for path in as_json:
        if len(path) == 1 and path[0] in by_type:
            found = mixed[path]
            words = ", ".join(f"{kind} in {place}" for kind, place in found.items())
            raise DataError(f"{name}, field {path[0]}: the values are of several types: {words}")
    return [path for path in mixed if path not in as_json], as_json


def _all_texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _all_texts(item)
