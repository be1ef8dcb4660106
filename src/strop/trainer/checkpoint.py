"""Checkpoints that are whole or absent.

A checkpoint is written into ``global_step_N.tmp``, listed in its manifest, made durable, renamed to
``global_step_N``, and only then named in ``latest_checkpointed_iteration.txt``. Whenever the process dies,
the file names a checkpoint that loads.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from strop.atomic import atomic_write_text
from strop.errors import CheckpointError

_LATEST = "latest_checkpointed_iteration.txt"
_MANIFEST = "manifest.json"
_TRAINER = "trainer.pt"
_TRAINED = ("actor", "critic")  # reference and reward model never change


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, folder: Path, *, max_to_keep: int | None = None) -> None:
        self.folder = folder
        self.max_to_keep = max_to_keep

    def save(self, step: int, groups: Mapping[str, Any], trainer_state: dict[str, Any]) -> Path:
        """Write ``global_step_<step>``; on failure (a full disk) the earlier checkpoints are as they were."""
        final, building = self.folder / f"global_step_{step}", self.folder / f"global_step_{step}.tmp"
        shutil.rmtree(building, ignore_errors=True)
        try:
            building.mkdir(parents=True)
            for name in _TRAINED:
                if name in groups:
                    groups[name].save_checkpoint(building / name)
            torch.save({**trainer_state, "random": _random_state()}, building / _TRAINER)
            _seal(building)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
            shutil.rmtree(building, ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint of iteration {step} could not be written to {self.folder} ({error}); "
                f"the latest whole one is {self._latest_step() or 'none'}"
            ) from error
        stale = self.folder / f"global_step_{step}.old"
        if final.exists():  # the same iteration again, after a resume from an earlier checkpoint
            shutil.rmtree(stale, ignore_errors=True)
            final.rename(stale)
        building.rename(final)
        atomic_write_text(self.folder / _LATEST, f"{step}\n")
        shutil.rmtree(stale, ignore_errors=True)
        self._prune(keep=step)
        return final

    def find(self, resume_mode: str) -> Path | None:
        """The checkpoint to resume from: ``auto`` (the latest, if any), ``disable``, or a path."""
        if resume_mode == "disable":
            return None
        if resume_mode == "auto":
            step = self._latest_step()
            if step is None:
                return None
            final, stale = self.folder / f"global_step_{step}", self.folder / f"global_step_{step}.old"
            if stale.exists() and not final.exists():  # died between two renames
                stale.rename(final)
            return final
        return Path(resume_mode).expanduser()

    def load(self, checkpoint: Path, groups: Mapping[str, Any]) -> dict[str, Any]:
        """Put the state back into worker groups and global random generators; returns the trainer's."""
        verify(checkpoint)
        for name in _TRAINED:
            if name in groups:
                if not (checkpoint / name).is_dir():
                    raise CheckpointError(
                        f"{checkpoint} has no {name}: it was made by a run without one; "
                        f"it has {[path.name for path in checkpoint.iterdir()]}"
                    )
                groups[name].load_checkpoint(checkpoint / name)
        try:
            state = torch.load(checkpoint / _TRAINER, weights_only=True)
        except (OSError, RuntimeError, EOFError) as error:
            raise CheckpointError(f"{checkpoint / _TRAINER} cannot be read: {error}") from error
        _restore_random_state(state.pop("random"))
        return state

    def _latest_step(self) -> int | None:
        try:
            return int((self.folder / _LATEST).read_text())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise CheckpointError(
                f"{self.folder / _LATEST} does not hold a number; write the iteration of a whole checkpoint "
                "into it, or set trainer.resume_mode=disable"
            ) from error

    def _prune(self, keep: int) -> None:
        """Keep the newest ``max_to_keep``, and always the one just written."""
        if self.max_to_keep is None:
            return
        steps = sorted(
            int(path.name.removeprefix("global_step_"))
            for path in self.folder.glob("global_step_*")
            if path.name.removeprefix("global_step_").isdigit()
        )
        for step in steps[: -self.max_to_keep]:
            if step != keep:
                shutil.rmtree(self.folder / f"global_step_{step}", ignore_errors=True)


def verify(checkpoint: Path) -> None:
    """``CheckpointError`` unless every file of the manifest is there with its size."""
    if not checkpoint.is_dir():
        raise CheckpointError(
            f"trainer.resume_mode: {checkpoint} is not a folder; expected a global_step_N folder"
        )
    manifest = checkpoint / _MANIFEST
    if not manifest.is_file():
        raise CheckpointError(
            f"{checkpoint} is not a whole checkpoint: it has no {_MANIFEST} (a save that was cut off, or "
            "another kind of folder); give a global_step_N folder"
        )
    sizes = json.loads(manifest.read_text())
    for name, size in sizes.items():
        path = checkpoint / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            raise CheckpointError(
                f"{checkpoint} is damaged: {name} has {'no file' if found is None else f'{found} bytes'}, "
                f"the manifest says {size} bytes"
            )


def _seal(building: Path) -> None:
    """List every file with its size and force all of them to disk."""
    files = sorted(path for path in building.rglob("*") if path.is_file())
    sizes = {str(path.relative_to(building)): path.stat().st_size for path in files}
    atomic_write_text(building / _MANIFEST, json.dumps(sizes, indent=1))
    for path in [*files, building]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _random_state() -> dict[str, Any]:
    """The global generators: strop draws from none of them, a user's reward function may."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state()
    name, keys, position, has_gauss, cached = numpy_state
    return {
        "python": (version, list(words), gauss),
        "numpy": (str(name), keys.tolist(), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _restore_random_state(state: dict[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
