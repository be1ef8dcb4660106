"""``manifest.json``: size and digest (XXH3-128) of every file of a checkpoint or an exported model.

A digest finds damage (a bad disk, a cut-off copy), no intent: whoever can write the files can write the
manifest. The processes that write large files take the digest of the bytes as they hand them to the system,
and leave it next to the file (``leave_digest``) for the process that writes the manifest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from strop.errors import CheckpointError, StropError, raised_as
from strop.files import atomic_write_text

MANIFEST = "manifest.json"
TRAINER_STATE = "trainer_state.json"
"""File of an exported model with its iteration, as transformers' trainer writes it: {"global_step": 100}."""
_SIZE, _DIGEST = "size", "xxh3_128"
_LEFT = f".{_DIGEST}"
DOWNLOADS = "downloads"
"""Folder of downloads in a cache: each is in a folder with its manifest."""
new_digest: Callable[[], xxhash.xxh3_128] = xxhash.xxh3_128


class Entry(NamedTuple):
    """Size and digest of one file."""

    size: int
    """Size in bytes."""
    digest: str | None
    """XXH3-128 in hex; None in manifests of earlier versions, which held sizes only."""


Manifest = dict[str, Entry]
"""Path relative to the manifest's folder, with slashes -> size and digest."""


def digest_of(path: Path) -> str:
    """Return the XXH3-128 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, new_digest).hexdigest()


def leave_digest(path: Path, digest: str | None = None) -> None:
    """Write the digest of ``path`` next to it, where ``describe`` finds it; None: of the file's content."""
    path.with_name(path.name + _LEFT).write_text(digest or digest_of(path))


def describe(folder: Path, known: Mapping[str, Entry] | None = None) -> Manifest:
    """Return the manifest of ``folder``; remove digests that were left next to files.

    A file is read unless a digest was left or is ``known``.
    """
    found = {path: path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    found.pop(folder / MANIFEST, None)
    left = {path.with_suffix(""): path for path in found if path.suffix == _LEFT}
    manifest = {}
    for path in sorted(found.keys() - set(left.values())):
        entry = (known or {}).get(found[path])
        digest = left[path].read_text() if path in left else entry and entry.digest
        manifest[found[path]] = Entry(path.stat().st_size, digest or digest_of(path))
    for path in left.values():
        path.unlink()
    return manifest


def write(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of ``folder`` in one step."""
    content = {name: {_SIZE: entry.size, _DIGEST: entry.digest} for name, entry in manifest.items()}
    atomic_write_text(folder / MANIFEST, json.dumps(content, indent=1))


def parse(text: str | bytes, where: str) -> Manifest | None:
    """Return the content of a manifest; None when ``text`` is not a whole one (an upload was cut off).

    Raises ``CheckpointError``, which names ``where``, for a path that is not relative or leaves the folder:
    what a manifest names is written to this disk.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    entries = (
        {name: _entry(value) for name, value in content.items()} if type(content) is dict else {"": None}
    )
    manifest = {name: entry for name, entry in entries.items() if entry is not None}
    if len(manifest) < len(entries):
        return None
    for name in manifest:
        require_below(name, f"{where}: {MANIFEST}", CheckpointError)
    return manifest


def require_below(name: str, where: str, kind: type[StropError]) -> str:
    """Return ``name``; raise ``kind`` unless it is a relative path that stays below its folder.

    For every name from elsewhere that is joined to a folder: of archives, buckets, manifests, indexes of
    weights and saved data sets. ``where`` is what names it, for the error.
    """
    if not name.isprintable() or "\\" in name or {"", ".", ".."} & set(name.split("/")):
        raise kind(
            f"{where} names {name!r}; expected a relative path below its folder, without . or .. in it"
        )
    return name


def digest_of_arrays(arrays: Mapping[str, Any]) -> str:
    """Return the XXH3-128 over names, dtypes, shapes and content of contiguous numpy arrays, in hex."""
    digest = new_digest()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array)
    return digest.hexdigest()


def _entry(value: object) -> Entry | None:
    match value:
        # type(), not isinstance: True is an int
        case int(size) if type(size) is int:
            return Entry(size, None)
        case {"size": int(size), "xxh3_128": str(digest)} if type(size) is int and len(value) == 2:
            return Entry(size, digest)
    return None


def require_sizes(where: str, manifest: Mapping[str, Entry], found: Mapping[str, int | None]) -> None:
    """Raise ``CheckpointError`` for the first file whose size differs; None or no entry means absent."""
    for name, entry in manifest.items():
        actual = found.get(name)
        if actual != entry.size:
            raise CheckpointError(
                f"{where} is damaged: {name} has {'no file' if actual is None else f'{actual} bytes'}, "
                f"the manifest says {entry.size} bytes"
            )


def require_unchanged(where: str, folder: Path, manifest: Mapping[str, Entry], remedy: str = "") -> None:
    """Read the files of ``manifest`` in ``folder``, and raise ``CheckpointError`` for the first damaged one.

    Files without a digest are compared by size.
    """
    require_sizes(where, manifest, sizes(folder, manifest))
    for name, entry in manifest.items():
        # a disk reports some damage itself
        with raised_as(CheckpointError, f"{where} is damaged: {name} cannot be read", OSError):
            found = entry.digest and digest_of(folder / name)
        if found != entry.digest:
            raise CheckpointError(
                f"{where} is damaged: the content of {name} is not what was written (XXH3-128 {found}, the "
                f"manifest says {entry.digest}){remedy}"
            )


def remedy_of(model: Path) -> str:
    """Return what to do about the folder of a damaged model, for the end of an error."""
    place = model.absolute().parent
    if place.parent.name == DOWNLOADS and (place / MANIFEST).is_file():
        return f"; delete {place}, and the next run downloads it again"
    return f"; if the model was changed on purpose, delete its {MANIFEST}"


def covering(folder: Path) -> Manifest:
    """Return the digests of the files below ``folder``, relative to it.

    They are in its own manifest (an exported model), or in that of the checkpoint of which it is a part.
    Empty without such a manifest; ``CheckpointError`` for a damaged one.
    """
    place, prefix = folder, ""
    for _ in range(3):  # exported, global_step_N/actor, global_step_N/actor/huggingface
        if (place / MANIFEST).is_file():
            content = (place / MANIFEST).read_bytes()
            found = parse(content, str(place))
            if found is None and (not content or _DIGEST.encode() in content):  # not another program's file
                raise CheckpointError(
                    f"{place} is damaged: {MANIFEST} is not what was written{remedy_of(folder)}"
                )
            return {
                name.removeprefix(prefix): entry
                for name, entry in (found or {}).items()
                if name.startswith(prefix) and entry.digest is not None
            }
        place, prefix = place.parent, f"{place.name}/{prefix}"
    return {}


def sizes(folder: Path, names: Iterable[str]) -> dict[str, int | None]:
    """Return the bytes of files in ``folder``; None for one that is not there."""
    paths = {name: folder / name for name in names}
    return {name: path.stat().st_size if path.is_file() else None for name, path in paths.items()}
