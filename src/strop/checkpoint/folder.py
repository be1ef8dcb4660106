"""The names and renames by which a finished checkpoint becomes the latest one of its run folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from strop.errors import CheckpointError
from strop.files import atomic_write_text, crash_point

# The list of a checkpoint's files with their sizes: a checkpoint is whole when every entry is there.

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


LATEST = "latest_checkpointed_iteration.txt"

PREFIX = "global_step_"


def building_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of iteration ``step`` is written."""
    return folder / f"{PREFIX}{step}.tmp"


def publish(folder: Path, step: int) -> Path:
    """Give a sealed checkpoint its name and make it the latest; returns it.

    After an interrupt it can be called again, and goes on where it was.
    """
    final, stale = folder / f"{PREFIX}{step}", folder / f"{PREFIX}{step}.old"
    if not is_renamed(folder, step):
        if final.exists():  # the same iteration again, after a resume from an earlier checkpoint
            shutil.rmtree(stale, ignore_errors=True)
            final.rename(stale)
        crash_point("rename", step)
        building_folder(folder, step).rename(final)
    crash_point("latest", step)
    make_latest(folder, step)
    shutil.rmtree(stale, ignore_errors=True)
    return final


def make_latest(folder: Path, step: int) -> None:
    """A run that is resumed goes on from there."""
    atomic_write_text(folder / LATEST, f"{step}\n")
    force_to_disk(folder)


def remove_unfinished(folder: Path) -> None:
    """What was dropped, or left by a process that was killed while it wrote or replaced a checkpoint."""
    for path in folder.glob(f"{PREFIX}*"):
        if path.suffix == ".tmp" or (path.suffix == ".old" and path.with_suffix("").exists()):
            shutil.rmtree(path, ignore_errors=True)


def is_renamed(folder: Path, step: int) -> bool:
    """Whether ``publish`` has got as far as to rename the checkpoint that was being written."""
    return (folder / f"{PREFIX}{step}").exists() and not building_folder(folder, step).exists()


def latest_step(folder: Path) -> int | None:
    """The iteration of the latest checkpoint; None when there is none."""
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
    """The latest checkpoint of a run folder, also when the run died while it was being replaced."""
    step = latest_step(folder)
    if step is None:
        return None
    final, stale = folder / f"{PREFIX}{step}", folder / f"{PREFIX}{step}.old"
    if stale.exists() and not final.exists():  # died between two renames
        stale.rename(final)
    return final


def saved_steps(folder: Path) -> list[int]:
    """The iterations of all whole checkpoints, in order."""
    names = (path.name.removeprefix(PREFIX) for path in folder.glob(f"{PREFIX}*"))
    return sorted(int(name) for name in names if name.isdigit())
