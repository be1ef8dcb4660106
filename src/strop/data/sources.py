"""Rows of anything that holds some: files, saved data sets, data sets on the hub, rows in memory.

All become one Arrow table, so that what follows does not depend on where rows come from. The format of a file
follows from its name: ``.parquet``, ``.jsonl``, ``.json``, ``.csv`` or ``.tsv``, the texts also with ``.gz``.
Nothing here imports torch.
"""

from __future__ import annotations

import codecs
import csv
import importlib
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import xxhash

from strop.config.names import is_installed
from strop.config.paths import HubSplit, expand, hub_split, is_rows, is_url, similar_path, with_split
from strop.data.fetch import local_path
from strop.data.records import (
    CHUNK_ROWS,
    is_compressed,
    json_records,
    open_data,
    records_table,
    table_of,
    to_rows,
)
from strop.errors import DataError, MissingExtraError, raised_as
from strop.manifest import require_below

SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz", ".tsv", ".tsv.gz")


@dataclass(frozen=True)
class Rows:
    """Rows that a program passes where a file could be named.

    ``data`` is a sequence of dicts, a ``datasets.Dataset``, a pandas or polars frame, or a pyarrow table;
    ``name`` stands for it in messages, and in the configuration as ``rows:NAME``.
    """

    name: str
    data: Any

    def __str__(self) -> str:
        return f"rows:{self.name}"


Source = str | Path | Rows
Files = Source | Sequence[Source]


def sources(names: Sequence[str], rows: Sequence[Rows]) -> list[Source]:
    """Return the sources that ``names`` stand for: the ``rows`` of this name, or a file."""
    given = {str(found): found for found in rows}
    return [given.get(name, name) for name in names]


def read_table(
    source: Source, *, texts: Collection[str] = (), cache_dir: str | Path | None = None
) -> pa.Table:
    """Return the rows of a path, a URL as in ``local_path``, a hub name with a split, or ``Rows``.

    ``strop.data.records.to_rows`` makes plain Python values of them.

    Numbers and truth values in the columns ``texts`` become text in formats without types of their own,
    and so do those of any other column of records that also holds texts.

    Raises :class:`DataError` for anything that cannot be found or read.
    """
    return _with_json_read(str(source), _without_views(_typed_table(source, texts, cache_dir)), texts)


def _without_views(table: pa.Table) -> pa.Table:
    """Return texts of views, as polars hands them over, in the type that the kernels of Arrow take."""
    plain = pa.schema([field.with_type(_without_view(field.type)) for field in table.schema])
    is_plain = plain.equals(table.schema)
    return table if is_plain else table.cast(plain.with_metadata(table.schema.metadata))


def _without_view(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_view(field.type)) for field in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        make = pa.list_ if pa.types.is_list(kind) else pa.large_list
        return make(kind.value_field.with_type(_without_view(kind.value_type)))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_without_view(kind.value_type)), kind.list_size)
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _without_view(kind.value_type), kind.ordered)
    return kind


def _typed_table(source: Source, texts: Collection[str], cache_dir: str | Path | None) -> pa.Table:
    if isinstance(source, Rows):
        return _rows_table(source, texts)
    name = str(source)
    if is_rows(name):
        raise DataError(
            f"{name}: stands for rows that a Python program passed, which are not here; name a file"
        )
    found = find(name, cache_dir)
    if isinstance(found, HubSplit):
        dataset = load_from_hub(found.repo, found.config, split=found.split, revision=found.revision)
        return dataset.with_format("arrow")[:]
    with reading(name):
        if found.is_dir():
            return _saved_table(found)
        kind = _format(found, name)
        if kind == "parquet":
            require_own_names(name, pq.read_schema(found).names)
            return pq.read_table(found, page_checksum_verification=True)
        with _reading_text(name, found):
            if kind == "csv":
                return _csv_table(name, found, texts)
            return records_table(name, lambda: json_records(name, found), texts)


JSON = "extension<arrow.json>"
"""The type of JSON texts, in which the package datasets stores values of several types."""


def _with_json_read(name: str, table: pa.Table, texts: Collection[str]) -> pa.Table:
    """Return ``table`` with the values of its JSON texts, as from a file of records."""
    for number, field in enumerate(table.schema if len(table) else ()):
        if JSON not in str(field.type):
            continue
        with raised_as(DataError, f"{name}, field {field.name}: not JSON", ValueError, RecursionError):
            rows = to_rows(table.select([number]))
            rows = [{field.name: _json_read(row[field.name], field.type)} for row in rows]
        found = table_of(name, rows, texts)
        table = table.set_column(number, field.name, found.column(field.name))
        for other in found.column_names[1:]:
            table = table.append_column(other, found.column(other))
    return table


def _json_read(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if str(kind) == JSON:
        return json.loads(value)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [_json_read(item, kind.value_type) for item in value]
    if pa.types.is_struct(kind):
        return {one.name: _json_read(value[one.name], one.type) for one in kind if one.name in value}
    return value


def read_records(path: Path, texts: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield the records of a file one by one; ``DataError`` names the file and the line.

    Columns ``texts`` of a CSV file are text.
    """
    name = str(path)
    require_file(path, name)
    with reading(name):
        kind = _format(path, name)
        if kind == "json":
            with _reading_text(name, path):
                yield from (record for _, record in json_records(name, path))
            return
        if kind == "csv":
            with _reading_text(name, path):
                batches: Iterable[pa.RecordBatch] = _csv_table(name, path, texts).to_batches(CHUNK_ROWS)
        else:
            file = pq.ParquetFile(path, page_checksum_verification=True)
            require_own_names(name, file.schema_arrow.names)
            batches = file.iter_batches()
        first_row = 0
        for batch in batches:
            table = pa.Table.from_batches([batch])
            require_readable(name, table, first_row=first_row)
            yield from to_rows(_with_json_read(name, table, texts))
            first_row += len(batch)


def value_at(row: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column; a dotted name (``extra_info.answer``) reaches into nested ones.

    Raises ``KeyError`` if there is no such column.
    """
    if column in row:
        return row[column]
    value: Any = row
    for name in column.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise KeyError(column)
        value = value[name]
    return value


def is_parquet(name: str) -> bool:
    """Return True for a local file of this format, whose footer has its columns and number of rows."""
    path = Path(expand(name))
    with reading(name):
        return path.is_file() and _format(path, name) == "parquet"


def find(name: str, cache_dir: str | Path | None = None) -> Path | HubSplit:
    """Return where the rows of ``name`` are: a file, the folder of a saved data set, or a split on the hub.

    A path on this machine takes precedence.
    """
    parts = with_split(name)
    if parts is not None and not Path(expand(name)).exists():
        base, split = parts
        if is_url(base) or Path(expand(base)).is_dir():
            folder = local_path(base, cache_dir)
            if not (folder / split).is_dir():
                found = sorted(path.name for path in folder.glob("*") if path.is_dir()) or "none"
                raise DataError(f"{name}: the folder {base} has no split {split!r}; its splits: {found}")
            return folder / split
        if (on_hub := hub_split(name)) is not None:
            return on_hub
    path = local_path(name, cache_dir)
    if not path.is_dir():
        require_file(path, name)
    return path


def folder_of(source: Source, cache_dir: str | Path | None = None) -> tuple[Path, bool]:
    """Return the folder in which the files that rows name are, and True if they may name no others.

    It is that of the file; of rows in memory the working folder, of those from the hub its cache.
    """
    if isinstance(source, Rows):
        return Path.cwd(), False
    found = find(str(source), cache_dir)
    if isinstance(found, HubSplit):
        from huggingface_hub.constants import HF_HOME

        return Path(HF_HOME), True
    base, _ = with_split(str(source)) or (str(source), "")
    return found if found.is_dir() else found.parent, is_url(base)


def require_file(path: Path, name: str) -> None:
    """Raise :class:`DataError` unless ``path`` is a regular file: the first read of a pipe never returns."""
    if not path.is_file():
        found = "a folder" if path.is_dir() else "no regular file" if path.exists() else "nothing"
        split = f"; a data set on the hub needs its split: {name}:train" if hub_split(f"{name}:x") else ""
        where = f"(looked at {path.absolute()}){similar_path(name) or split}"
        raise DataError(f"{name}: expected a data file, found {found} {where}")


def require_own_names(name: str, columns: Sequence[str]) -> None:
    """Raise :class:`DataError` if two columns have one name, as after a join."""
    if twice := [column for column, count in Counter(columns).items() if count > 1]:
        raise DataError(f"{name}: two columns have the name {twice[0]!r}; rename one")


_MAY_NOT_CONVERT = re.compile("timestamp|date|time|duration")  # nanoseconds, years after 9999


def require_readable(name: str, table: pa.Table, *, first_row: int = 0) -> None:
    """Raise :class:`DataError` for the first value that is no plain Python value, such as text not in UTF-8.

    ``name`` is the file's, ``first_row`` the number in it of the table's first row.
    """
    for column, values in zip(table.column_names, table.columns, strict=True):
        try:
            # in full: Arrow compares lengths and offsets otherwise, and does not look at UTF-8
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


def reading(name: str) -> AbstractContextManager[None]:
    """Turn read errors of the body into a :class:`DataError` about the source ``name``."""
    types = (pa.ArrowException, OSError, EOFError, zlib.error, UnicodeDecodeError, RecursionError)
    return raised_as(DataError, f"{name}: cannot be read", *types)


@contextmanager
def _reading_text(name: str, path: Path) -> Generator[None]:
    """Replace an error of the body by one about the encoding of the file at ``path``, if it is not UTF-8."""
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, DataError) as error:
        if found := _other_encoding(path):
            raise DataError(f"{name}{found}") from error
        raise


_NO_TEXTS = {
    b"PK\x03\x04": "a zip archive or a spreadsheet of Excel (save it as CSV)",
    b"\xd0\xcf\x11\xe0": "a spreadsheet of Excel (save it as CSV)",
    b"\x1f\x8b": "a file of gzip (its name must end in .gz)",
    b"PAR1": "a parquet file (its name must end in .parquet)",
}
"""First bytes of files that have the name of a text by mistake."""


def _other_encoding(path: Path) -> str:
    """Return where a file of texts is not UTF-8, and how to convert it; "" if it is."""
    convert = "save it as UTF-8, or convert it: iconv -f {} -t UTF-8 OLD > NEW"
    with open_data(path) as lines:
        for mark, kind in _NO_TEXTS.items():
            if lines.peek(len(mark)).startswith(mark):
                return f": found {kind}, expected text, as its name says"
        for number, line in enumerate(lines, 1):
            if number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                return f": the text is UTF-16, expected UTF-8; {convert.format('UTF-16')}"
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                shown = line[max(error.start - 20, 0) : error.end + 20]
                where = f", line {number}: text that is not UTF-8: {shown!r}; "
                return where + convert.format("LATIN1") + ", with the encoding that it has"
    return ""


def load_from_hub(repo: str, config: str | None, **options: Any) -> Any:
    """Return what ``datasets.load_dataset`` returns; ``DataError`` if it cannot load."""
    datasets = _datasets(f"reading {repo} from the hub")
    try:
        given = {name: value for name, value in options.items() if value is not None}
        return datasets.load_dataset(repo, config, **given)
    # The package raises many kinds: unknown name, no network, unknown configuration or split.
    except Exception as error:
        reason = str(error) or type(error).__name__
        if "onfig" in reason and config is None:
            reason += f". Name the configuration after the data set: {repo}/CONFIGURATION:SPLIT"
        raise DataError(
            f"{repo}: neither a local path nor a hub data set that can be loaded: {reason}"
        ) from error


def _datasets(needed_for: str) -> Any:
    if not is_installed("datasets"):
        raise MissingExtraError("datasets", "hub", needed_for)
    with raised_as(DataError, f"{needed_for} needs datasets, which is installed and fails", ImportError):
        return importlib.import_module("datasets")


def _format(path: Path, name: str) -> str:
    """Return parquet, json or csv; a file of another name must begin as parquet files do."""
    kinds = {"parquet": "parquet", "jsonl": "json", "json": "json", "csv": "csv", "tsv": "csv"}
    kind = kinds.get(_suffix(path))
    if kind is None:
        with path.open("rb") as handle:
            if handle.read(4) != b"PAR1":
                raise DataError(
                    f"{name}: the format is not known; save it as CSV, or another of {', '.join(SUFFIXES)}"
                )
    return kind or "parquet"


def _suffix(path: Path) -> str:
    return path.name.partition("?")[0].lower().removesuffix(".gz").rpartition(".")[2]


def saved_splits(folder: Path) -> list[str]:
    """Return the splits in a folder of ``datasets.DatasetDict.save_to_disk``; none of any other folder."""
    file = folder / "dataset_dict.json"
    if not file.is_file():
        return []
    with _reading_state(file):
        return [str(split) for split in json.loads(file.read_bytes())["splits"]]


def _reading_state(file: Path) -> AbstractContextManager[None]:
    damaged = (OSError, ValueError, LookupError, TypeError, RecursionError)
    return raised_as(DataError, f"{file}: not as `save_to_disk` writes it; save the data set again", *damaged)


def _saved_table(folder: Path) -> pa.Table:
    """Return the rows of a folder of ``datasets.Dataset.save_to_disk``, which stay on disk until used."""
    if splits := saved_splits(folder):
        named = " or ".join(f"{folder}:{split}" for split in splits)
        raise DataError(f"{folder}: expected one split of the data set, {named}")
    if not (folder / "state.json").is_file():
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
        raise DataError(
            f"{folder}: expected a data file, found a folder with {found}; a folder must be one of "
            f"`save_to_disk` of the package datasets. Else name its files, which may be a list"
        )
    state = folder / "state.json"
    with _reading_state(state):
        files = [str(file["filename"]) for file in json.loads(state.read_bytes())["_data_files"]]
    paths = [str(folder / require_below(file, str(state), DataError)) for file in files]
    return pa.concat_tables([pa.ipc.open_stream(pa.memory_map(path)).read_all() for path in paths])


def _csv_table(name: str, path: Path, texts: Collection[str]) -> pa.Table:
    """Return a CSV file with types inferred by pyarrow; an empty number is null.

    Dates are texts, and so are whole numbers where one begins with a zero: ``007`` is no 7.
    """
    delimiter = _delimiter(name, path)
    _require_closed_quotes(name, path, delimiter)

    def read(text_columns: Iterable[str], only: Sequence[str] = ()) -> pa.Table:
        return pyarrow.csv.read_csv(
            open_data(path) if is_compressed(path) else path,
            # without threads, errors have a row number; a row must fit into a block
            read_options=pyarrow.csv.ReadOptions(use_threads=False, block_size=_LONGEST_ROW),
            # a quoted text may span lines, as solutions do
            parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types=dict.fromkeys(text_columns, pa.string()),
                null_values=[""],  # "NA" and "null" are texts, too, and an empty one is no null
                include_columns=list(only),  # none: all
            ),
        )

    table = read(texts)
    require_own_names(name, table.column_names)
    for field in table.schema:
        if pa.types.is_binary(field.type):
            raise DataError(f"{name}, field {field.name}: text that is not UTF-8")  # _reading_text: the line
    as_text = [field.name for field in table.schema if pa.types.is_temporal(field.type)]
    if whole := {field.name for field in table.schema if pa.types.is_integer(field.type)}:
        written = read(whole, only=list(whole))
        begins = pc.MatchSubstringOptions(r"^[+-]?0\d")
        for name, column in zip(written.column_names, written.columns, strict=True):
            found = pc.call_function("match_substring_regex", [column], begins)
            as_text += [name] if pc.call_function("any", [found]).as_py() else []
    return read([*texts, *as_text]) if as_text else table


_LONGEST_ROW, _LONGEST_HEADER = 64 * 2**20, 100_000
"""In bytes; the latter is below the csv module's limit of a field."""


def _require_closed_quotes(name: str, path: Path, delimiter: str) -> None:
    """Raise ``DataError`` with the line of an unclosed quote; pyarrow may read all below it as one text."""
    with open_data(path) as file:
        if sum(block.count(b'"') for block in iter(lambda: file.read(2**20), b"")) % 2 == 0:
            return
    with open_data(path) as file:
        rows = csv.reader((line.decode(errors="replace") for line in file), delimiter=delimiter, strict=True)
        line = 1
        try:
            for _ in rows:
                line = rows.line_num + 1
        except csv.Error as error:
            raise DataError(
                f'{name}, line {line}: a quote (") opens in this row and is not closed; '
                'a quote inside a quoted text is written twice ("")'
            ) from error


def _delimiter(name: str, path: Path) -> str:
    """Return what separates the names in the header: a comma, else the semicolon or tab of spreadsheets."""
    with open_data(path) as file:  # lines of some spreadsheets end with \r alone
        beginning = file.read(_LONGEST_HEADER)
        header = re.split(rb"[\r\n]", beginning, maxsplit=1)[0].decode(errors="replace")
    if len(header) >= _LONGEST_HEADER:
        raise DataError(
            f"{name}: its first line, expected the names of the columns, has over {_LONGEST_HEADER:,} "
            "characters"
        )
    if _suffix(path) == "tsv":
        return "\t"
    columns = {mark: len(next(csv.reader([header], delimiter=mark), [])) for mark in ",;\t"}
    return "," if columns[","] > 1 else max(columns, key=columns.__getitem__)


def fingerprint(rows: Rows) -> tuple[str, int]:
    """Return a digest of the content, and the number of rows. Raises as ``read_table``."""
    # neither pandas' metadata nor the cut into chunks is content
    table = read_table(rows).replace_schema_metadata()
    sink = _Digest()
    try:
        parts = [table.combine_chunks()]
    except pa.ArrowInvalid:  # nested values of more bytes than 32-bit offsets reach
        parts = [table.slice(at, CHUNK_ROWS).combine_chunks() for at in range(0, len(table), CHUNK_ROWS)]
    with pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), table.schema) as stream:
        for part in parts:
            stream.write_table(part)
    return sink.hasher.hexdigest()[:8], len(table)


class _Digest(io.RawIOBase):
    """A file that keeps only the digest of what is written."""

    def __init__(self) -> None:
        self.hasher = xxhash.xxh3_64()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.hasher.update(data)
        return len(data)


def _rows_table(rows: Rows, texts: Collection[str]) -> pa.Table:
    data: Any = rows.data
    package = type(data).__module__.partition(".")[0]
    if package == "datasets" and hasattr(data, "with_format") and hasattr(data, "num_rows"):
        if isinstance(data, Mapping):
            raise DataError(f"{rows}: found the splits {sorted(data)}, expected one of them")
        return data.with_format("arrow")[:]
    try:
        if package == "pandas" and hasattr(data, "columns"):
            require_own_names(str(rows), [str(column) for column in data.columns])
            return pa.Table.from_pandas(data, preserve_index=False)
        if package != "pandas" and hasattr(data, "__arrow_c_stream__"):
            table = pa.table(data)
            require_own_names(str(rows), table.column_names)
            return table
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):
        if package != "pandas":
            raise
        # a column of pandas' with values of several types, large numbers or text that is no Unicode
        data = data.astype(object).where(data.notna(), None).to_dict("records")
    if isinstance(data, str | bytes | Mapping) or not isinstance(data, Sequence):
        raise DataError(
            f"{rows}: expected a list of dicts, a datasets.Dataset or a data frame, "
            f"found {type(data).__module__}.{type(data).__name__}"
        )
    with reading(str(rows)):
        return table_of(str(rows), data, texts)
