"""Raw records of a data set by split, from files, URLs or the Hugging Face hub; and the shape of a row."""

from __future__ import annotations

import gzip
import importlib
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from strop.config.paths import is_url
from strop.data.fetch import local_path
from strop.data.prompt_table import require_file, require_readable
from strop.errors import DataError, MissingExtraError

Splits = Mapping[str, Sequence[dict[str, Any]]]

_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")

_SPLIT_NAMES = {"train": "train", "test": "test"} | dict.fromkeys(
    ("validation", "valid", "val", "dev"), "validation"
)

# Matches train.jsonl, train-00000-of-00002.parquet, train_0.jsonl and harmless-base.test.jsonl; not
# train_socratic.jsonl, which is another data set.
_SPLIT_FILE = re.compile(r"(train|test|validation|valid|val|dev)([-_.]\d.*)?", re.IGNORECASE)

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def read_source(
    source: str | Path,
    *,
    hub_config: str | None = None,
    cache_dir: str | Path | None = None,
    unnamed_split: str | None = None,
) -> Splits:
    """Return ``{split: records}`` of a file, a folder, an fsspec URL or a hub name.

    Reads a folder's files that are named after a split (``train.jsonl``, ``test-00000-of-00001.parquet``) and
    joins those of one split in the order of their names. ``hub_config`` is the configuration's name on the
    hub. If no file is named after a split, all files belong to ``unnamed_split``.

    Raises:
        DataError: nothing usable at ``source``, or no file is named after a split and ``unnamed_split`` is
            None.
    """
    path = local_path(source, cache_dir)
    if path.is_dir():
        return _read_files(str(source), sorted(path.iterdir()), unnamed_split)
    if path.is_file():
        return _read_files(str(source), [path], unnamed_split)
    name = str(source)
    if not is_url(name) and _HUB_NAME.fullmatch(name) and not name.startswith("."):
        return _read_hub(name, hub_config)
    raise DataError(f"source {name}: no such file or folder (and it does not look like a hub name)")


def _read_files(source: str, paths: list[Path], unnamed_split: str | None) -> Splits:
    stems = {path: stem for path in paths if (stem := _stem_of(path)) is not None}
    named = {path: split for path, stem in stems.items() if (split := _split_of(stem)) is not None}
    if not named and unnamed_split is not None:
        named = dict.fromkeys(stems, unnamed_split)
    splits: dict[str, list[dict[str, Any]]] = {}
    for path, split in named.items():
        splits.setdefault(split, []).extend(read_records(path))
    if not splits:
        found = ", ".join(path.name for path in paths[:10]) or "nothing"
        names = "files" if unnamed_split is not None else "files named train, test or validation,"
        raise DataError(f"source {source}: found {found}; expected {names} ending in {', '.join(_SUFFIXES)}")
    return splits


def _stem_of(path: Path) -> str | None:
    """Return the name of a data file without its suffix; None for other files and lists of rejects."""
    for suffix in _SUFFIXES:
        if path.name.endswith(suffix):
            stem = path.name.removesuffix(suffix)
            return None if stem.endswith(".rejected") else stem
    return None


def _split_of(stem: str) -> str | None:
    for part in (stem, *stem.split(".")):
        if match := _SPLIT_FILE.fullmatch(part):
            return _SPLIT_NAMES[match[1].lower()]
    return None


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a parquet file or of JSON lines; ``DataError`` names the file and the line."""
    try:
        require_file(path, str(path))
        if path.suffix == ".parquet":
            first_row = 0
            for batch in pq.ParquetFile(path).iter_batches():
                require_readable(str(path), pa.Table.from_batches([batch]), first_row=first_row)
                yield from batch.to_pylist()
                first_row += len(batch)
            return
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, data in enumerate(lines, 1):
                line = data.decode("utf-8").strip()
                try:
                    record = json.loads(line) if line else {}
                except (ValueError, RecursionError) as error:  # numbers of 4,300 digits, too
                    raise DataError(f"{path}, line {number}: not JSON: {error}") from error
                if not isinstance(record, dict):
                    raise DataError(f"{path}, line {number}: expected an object, found {line:.60}")
                if line:
                    yield record
    except (pa.ArrowException, OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _read_hub(name: str, config: str | None) -> Splits:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise MissingExtraError("datasets", "hub", f"reading {name} from the hub") from error
    try:
        found = datasets.load_dataset(name, config)
    # The package raises many kinds: unknown name, no network, unknown configuration.
    except Exception as error:
        raise DataError(
            f"source {name}: neither a local path nor a hub data set that can be loaded: {error}"
        ) from error
    return {_SPLIT_NAMES.get(str(split), str(split)): records for split, records in found.items()}


Convert = Callable[[Any, str, int], dict[str, Any]]
"""``convert(record, split, index)`` returns the row of a record, or raises :class:`DataError`."""


@dataclass(frozen=True)
class Split:
    """Raw records, and the function that makes a row of one."""

    records: Sequence[Any]
    convert: Convert


def read_splits(source: str | Path, convert: Convert, **options: Any) -> dict[str, Split]:
    """Read ``source`` with the options of :func:`read_source`, and make rows with ``convert``."""
    return {split: Split(found, convert) for split, found in read_source(source, **options).items()}


def make_row(
    *,
    data_source: str,
    prompt: str | list[dict[str, str]],
    ability: str,
    ground_truth: str,
    split: str,
    index: int,
    style: str = "rule",
    **extra_info: Any,
) -> dict[str, Any]:
    """Return a row for ``strop train``; a ``prompt`` that is a string becomes one user message.

    The ground truth is a string in every data set, so that files of several can be joined.
    """
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
        "ability": ability,
        "reward_model": {"style": style, "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, **extra_info},
    }


def text_field(record: Any, name: str) -> str:
    """Return a non-empty string of a record; raise :class:`DataError` with the field's name otherwise."""
    value = record.get(name)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"field {name}: expected text, found {value!r:.60} (the record has {sorted(record)})")
    return value
