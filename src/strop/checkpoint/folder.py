"""Checkpoint folders on disk: the manifest that makes one whole, and the renames that make it the latest.

A checkpoint is written to ``global_step_N.tmp``; its manifest lists every file with its size. ``publish``
renames it to ``global_step_N`` and only then writes ``latest_checkpointed_iteration.txt``.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from strop.errors import CheckpointError
from strop.files import atomic_write_text, crash_point

MANIFEST = "manifest.json"
"""Sizes of a checkpoint's files; the checkpoint is whole if every file is there with its size."""
LATEST = "latest_checkpointed_iteration.txt"
PREFIX = "global_step_"


def seal(building: Path) -> None:
    """Write the manifest of ``building`` and force all files to disk; may be repeated after an interrupt."""
    (building / MANIFEST).unlink(missing_ok=True)
    files = sorted(path for path in building.rglob("*") if path.is_file())
    sizes = {path.relative_to(building).as_posix(): path.stat().st_size for path in files}
    atomic_write_text(building / MANIFEST, json.dumps(sizes, indent=1))
    folders = [path for path in building.rglob("*") if path.is_dir()]
    for path in [*files, *folders, building]:
        force_to_disk(path)


def force_to_disk(path: Path) -> None:
    """Sync a file's content, or a folder's names, so that they survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def parse_manifest(text: str | bytes) -> dict[str, int] | None:
    """Return relative path -> bytes; None when ``text`` is not a whole manifest (an upload was cut off)."""
    try:
        sizes = json.loads(text)
    except ValueError:
        return None
    is_manifest = isinstance(sizes, dict) and all(type(size) is int for size in sizes.values())
    return sizes if is_manifest else None


def verify(checkpoint: Path) -> None:
    """Raise ``CheckpointError`` unless every file of the manifest is there with its size."""
    if not checkpoint.is_dir():
        raise CheckpointError(
            f"trainer.resume_mode: {checkpoint} is not a folder; expected a global_step_N folder"
        )
    manifest = checkpoint / MANIFEST
    sizes = parse_manifest(manifest.read_bytes()) if manifest.is_file() else None
    if sizes is None:
        raise CheckpointError(
            f"{checkpoint} is not a whole checkpoint: it has no whole {MANIFEST} (a save was cut off, or it "
            "is another kind of folder); give a global_step_N folder"
        )
    require_sizes(str(checkpoint), sizes, {name: _size(checkpoint / name) for name in sizes})


def require_sizes(where: str, expected: dict[str, int], found: dict[str, int | None]) -> None:
    """Raise ``CheckpointError`` for the first file whose size differs; None or no entry means absent."""
    for name, size in expected.items():
        actual = found.get(name)
        if actual != size:
            raise CheckpointError(
                f"{where} is damaged: {name} has {'no file' if actual is None else f'{actual} bytes'}, "
                f"the manifest says {size} bytes"
            )


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def building_folder(folder: Path, step: int) -> Path:
    """Return the folder in which the checkpoint of iteration ``step`` is written."""
    return folder / f"{PREFIX}{step}.tmp"


def publish(folder: Path, step: int) -> Path:
    """Rename a sealed checkpoint and make it the latest; return its folder. Idempotent after an interrupt."""
    final, stale = folder / f"{PREFIX}{step}", folder / f"{PREFIX}{step}.old"
    if not is_renamed(folder, step):
        if final.exists():  # repeated after a resume from an earlier checkpoint
            shutil.rmtree(stale, ignore_errors=True)
            final.rename(stale)
        crash_point("rename", step)
        building_folder(folder, step).rename(final)
    crash_point("latest", step)
    make_latest(folder, step)
    shutil.rmtree(stale, ignore_errors=True)
    return final


def make_latest(folder: Path, step: int) -> None:
    """Record ``step`` as the one to resume from."""
    atomic_write_text(folder / LATEST, f"{step}\n")
    force_to_disk(folder)


def remove_unfinished(folder: Path) -> None:
    """Delete folders left by a save that was cancelled or killed while writing or replacing a checkpoint."""
    for path in folder.glob(f"{PREFIX}*"):
        if path.suffix == ".tmp" or (path.suffix == ".old" and path.with_suffix("").exists()):
            shutil.rmtree(path, ignore_errors=True)


def is_renamed(folder: Path, step: int) -> bool:
    """Return True if ``publish`` has already renamed the checkpoint of iteration ``step``."""
    return (folder / f"{PREFIX}{step}").exists() and not building_folder(folder, step).exists()


def latest_step(folder: Path) -> int | None:
    """Return the iteration of the latest checkpoint; None when there is none."""
    try:
        return int((folder / LATEST).read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CheckpointError(
            f"{folder / LATEST} does not hold a number; write the iteration of a whole checkpoint "
            "into it, or set trainer.resume_mode=disable"
        ) from error


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the latest checkpoint of a run folder; undo the first of two renames if the run died between."""
    step = latest_step(folder)
    if step is None:
        return None
    final, stale = folder / f"{PREFIX}{step}", folder / f"{PREFIX}{step}.old"
    if stale.exists() and not final.exists():  # died between two renames
        stale.rename(final)
    return final


def saved_steps(folder: Path) -> list[int]:
    """Return the iterations of all published checkpoint folders, in order, without verifying them."""
    names = (path.name.removeprefix(PREFIX) for path in folder.glob(f"{PREFIX}*"))
    return sorted(int(name) for name in names if name.isascii() and name.isdecimal())
