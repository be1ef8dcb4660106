"""``strop export``: a checkpoint becomes a Hugging Face folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from strop.errors import CheckpointError
from strop.trainer.checkpoint import verify


def export(checkpoint: str | Path, out: str | Path, *, role: str = "actor") -> Path:
    """Copy the model of ``role`` out of a ``global_step_N`` folder; ``out`` must not exist yet.

    Raises ``CheckpointError`` when the checkpoint is not whole or lacks that role.
    """
    checkpoint, out = Path(checkpoint).expanduser(), Path(out).expanduser()
    verify(checkpoint)
    source = checkpoint / role / "huggingface"
    if not source.is_dir():
        found = sorted(path.name for path in checkpoint.iterdir() if path.is_dir())
        raise CheckpointError(f"{checkpoint} holds no {role}; it holds {found}")
    if out.exists():
        raise CheckpointError(f"{out} exists already; name a folder that does not")
    building = out.with_name(f"{out.name}.tmp")
    shutil.rmtree(building, ignore_errors=True)
    shutil.copytree(source, building)
    building.rename(out)
    return out
