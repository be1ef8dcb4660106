"""Raw records of a data set by split, from files, URLs or the Hugging Face hub; and the shape of a row."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.config.paths import expand, hub_split, is_url, similar_path, with_split
from strop.data.fetch import local_path
from strop.data.records import to_rows
from strop.data.sources import SUFFIXES, load_from_hub, read_records, read_table, saved_splits
from strop.errors import DataError

Splits = Mapping[str, Sequence[dict[str, Any]]]

_SPLIT_NAMES = {"train": "train", "test": "test"} | dict.fromkeys(
    ("validation", "valid", "val", "dev"), "validation"
)

# Matches train.jsonl, train-00000-of-00002.parquet, train_0.jsonl and harmless-base.test.jsonl; not
# train_socratic.jsonl, which is another data set.
_SPLIT_FILE = re.compile(r"(train|test|validation|valid|val|dev)([-_.]\d.*)?", re.IGNORECASE)


def read_source(
    source: str | Path,
    *,
    hub_config: str | None = None,
    cache_dir: str | Path | None = None,
    unnamed_split: str | None = None,
    texts: Collection[str] = (),
) -> Splits:
    """Return ``{split: records}`` of a file, a folder, a saved data set, an fsspec URL or a hub name.

    Reads a folder's files that are named after a split (``train.jsonl``, ``test-00000-of-00001.parquet``) and
    joins those of one split in the order of their names. ``hub_config`` is the configuration's name on the
    hub. If no file is named after a split, all files belong to ``unnamed_split``. Columns ``texts`` of CSV
    files are text.

    Raises:
        DataError: nothing usable at ``source``, or no file is named after a split and ``unnamed_split`` is
            None.
    """
    name = str(source)
    parts = None if Path(expand(name)).exists() else with_split(name)
    base = name if parts is None else parts[0]
    is_here = is_url(base) or Path(expand(base)).exists()
    if not is_here and (similar := similar_path(base)):
        raise DataError(f"source {name}: no such file or folder{similar}")
    if parts is not None:
        return _read_split(name, cache_dir)
    if not is_here and hub_split(f"{name}:x"):
        return _read_hub(name, hub_config)
    path = local_path(name, cache_dir)
    if path.is_file():
        return _read_files(name, [path], unnamed_split, texts)
    if splits := saved_splits(path):
        return {_split_of(split) or split: to_rows(read_table(f"{path}:{split}")) for split in splits}
    if (path / "state.json").is_file():
        return {_split_of(path.name) or unnamed_split or "train": to_rows(read_table(path))}
    if path.is_dir():
        return _read_files(name, sorted(path.iterdir()), unnamed_split, texts)
    raise DataError(f"source {name}: no such file or folder, nor a name on the hub")


def _read_split(name: str, cache_dir: str | Path | None) -> Splits:
    """Return the only split that a name has after a colon."""
    split = (with_split(name) or ("", ""))[1].partition("[")[0]
    return {_split_of(split) or split: to_rows(read_table(name, cache_dir=cache_dir))}


def _read_files(source: str, paths: list[Path], unnamed_split: str | None, texts: Collection[str]) -> Splits:
    stems = {path: stem for path in paths if (stem := _stem_of(path)) is not None}
    named = {path: split for path, stem in stems.items() if (split := _split_of(stem)) is not None}
    if not named and unnamed_split is not None:
        named = dict.fromkeys(stems, unnamed_split)
    splits: dict[str, list[dict[str, Any]]] = {}
    for path, split in named.items():
        splits.setdefault(split, []).extend(read_records(path, texts))
    if not splits:
        found = ", ".join(path.name for path in paths[:10]) or "nothing"
        names = "files" if unnamed_split is not None else "files named train, test or validation,"
        raise DataError(f"source {source}: found {found}; expected {names} ending in {', '.join(SUFFIXES)}")
    return splits


def _stem_of(path: Path) -> str | None:
    """Return the name of a data file without its suffix; None for other files and lists of rejects.

    As where it is read, the suffix may be in capitals, and the query of a URL may follow.
    """
    name = path.name.partition("?")[0]
    for suffix in SUFFIXES:
        if name.lower().endswith(suffix):
            stem = name[: -len(suffix)]
            return None if stem.endswith(".rejected") else stem
    return None


def _split_of(stem: str) -> str | None:
    for part in (stem, *stem.split(".")):
        if match := _SPLIT_FILE.fullmatch(part):
            return _SPLIT_NAMES[match[1].lower()]
    return None


def _read_hub(name: str, config: str | None) -> Splits:
    parts = hub_split(f"{name}:all")
    repo, revision = (parts.repo, parts.revision) if parts else (name, None)
    found = load_from_hub(repo, (parts.config if parts else None) or config, revision=revision)
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
