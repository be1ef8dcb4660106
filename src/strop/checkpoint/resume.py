"""Find the checkpoint to resume from, and download a remote one to the disk that all nodes share."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from strop.checkpoint.folder import building_folder, latest_checkpoint, publish, seal
from strop.checkpoint.remote import RemoteCheckpoints, download, read_manifest
from strop.config.paths import expand, is_url
from strop.errors import CheckpointError


def find_checkpoint(folder: Path, resume_mode: str, remote: RemoteCheckpoints | None) -> Path | None:
    """Return the checkpoint that ``trainer.resume_mode`` selects, or None for a fresh start.

    ``disable`` selects none. ``auto`` selects the latest of the run folder; if there is none, the latest of
    ``remote``, which is downloaded and becomes the latest of the run folder. Otherwise a path, or the URL of
    a ``global_step_N`` folder, which is downloaded into ``<folder>/downloaded``.
    """
    if resume_mode == "disable":
        return None
    if resume_mode == "auto":
        found = latest_checkpoint(folder)
        return _fetch_latest(folder, remote) if found is None and remote is not None else found
    if is_url(resume_mode):
        return _fetch_named(folder, resume_mode.rstrip("/"))
    return Path(expand(resume_mode))


def _fetch_latest(folder: Path, remote: RemoteCheckpoints) -> Path | None:
    try:
        step = remote.latest()
    except Exception as error:  # back-ends raise their own types: botocore's, pyarrow's, OSError
        raise CheckpointError(
            f"{remote.url} cannot be searched for a checkpoint to resume from ({type(error).__name__}: "
            f"{error}); set trainer.resume_mode=disable to start from scratch"
        ) from error
    if step is None:
        return None
    building = building_folder(folder, step)
    shutil.rmtree(building, ignore_errors=True)
    seal(building, download(remote.url_of(step), building))
    return publish(folder, step)


def _fetch_named(folder: Path, url: str) -> Path:
    """Return a local copy of a remote checkpoint; a copy with the same manifest is used again."""
    manifest = read_manifest(url)
    key = hashlib.sha256(f"{url} {manifest}".encode()).hexdigest()[:16]
    home = folder / "downloaded" / key
    name = url.rpartition("/")[2]
    if not home.exists():
        shutil.rmtree(home.parent, ignore_errors=True)  # a download that was cut off, or another checkpoint
        building = home.with_name(f"{key}.tmp")
        seal(building / name, download(url, building / name))
        building.rename(home)
    return home / name
