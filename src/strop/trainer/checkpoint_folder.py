"""The names and renames by which a finished checkpoint becomes the latest one of its run folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from strop.errors import CheckpointError
from strop.files import atomic_write_text
from strop.trainer.manifest import force_to_disk

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
        building_folder(folder, step).rename(final)
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
