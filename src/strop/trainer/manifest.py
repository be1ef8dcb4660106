"""The list of a checkpoint's files with their sizes: a checkpoint is whole when every entry is there."""

from __future__ import annotations

import json
import os
from pathlib import Path

from strop.errors import CheckpointError
from strop.files import atomic_write_text

MANIFEST = "manifest.json"


def seal(building: Path) -> None:
    """List every file with its size and force all of them to disk; once more after an interrupt."""
    (building / MANIFEST).unlink(missing_ok=True)
    files = sorted(path for path in building.rglob("*") if path.is_file())
    sizes = {path.relative_to(building).as_posix(): path.stat().st_size for path in files}
    atomic_write_text(building / MANIFEST, json.dumps(sizes, indent=1))
    folders = [path for path in building.rglob("*") if path.is_dir()]
    for path in [*files, *folders, building]:
        force_to_disk(path)


def force_to_disk(path: Path) -> None:
    """The content of a file, or the names in a folder, survive a power cut from here on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def parse_manifest(text: str | bytes) -> dict[str, int] | None:
    """Relative path -> bytes; None when ``text`` is not a whole manifest (an upload that was cut off)."""
    try:
        sizes = json.loads(text)
    except ValueError:
        return None
    is_manifest = isinstance(sizes, dict) and all(type(size) is int for size in sizes.values())
    return sizes if is_manifest else None


def verify(checkpoint: Path) -> None:
    """``CheckpointError`` unless every file of the manifest is there with its size."""
    if not checkpoint.is_dir():
        raise CheckpointError(
            f"trainer.resume_mode: {checkpoint} is not a folder; expected a global_step_N folder"
        )
    manifest = checkpoint / MANIFEST
    sizes = parse_manifest(manifest.read_bytes()) if manifest.is_file() else None
    if sizes is None:
        raise CheckpointError(
            f"{checkpoint} is not a whole checkpoint: it has no whole {MANIFEST} (a save that was cut off, "
            "or another kind of folder); give a global_step_N folder"
        )
    require_sizes(str(checkpoint), sizes, {name: _size(checkpoint / name) for name in sizes})


def require_sizes(where: str, expected: dict[str, int], found: dict[str, int | None]) -> None:
    """``CheckpointError`` naming the first file whose size differs; None or no entry: it is absent."""
    for name, size in expected.items():
        actual = found.get(name)
        if actual != size:
            raise CheckpointError(
                f"{where} is damaged: {name} has {'no file' if actual is None else f'{actual} bytes'}, "
                f"the manifest says {size} bytes"
            )


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None
