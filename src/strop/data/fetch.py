"""Local copies of remote files, and the progress bar of slow preparations.

``local_path`` accepts whatever a user may write for ``data.train_files`` or ``actor_rollout_ref.model.path``:
a local path, ``hdfs://``, ``s3://`` or any other URL that fsspec has a back-end for.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from filelock import FileLock
from fsspec.callbacks import Callback
from fsspec.implementations.local import LocalFileSystem
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from strop import manifest
from strop.config.paths import expand, is_url
from strop.errors import CheckpointError, DataError, StropError
from strop.files import atomic_folder

logger = logging.getLogger("strop.data")

DEFAULT_CACHE_DIR = "~/.cache/strop"
# File systems report a file's version under different names; any of these changes with its content.
_VERSION_FACTS = (
    "size", "mtime", "created", "ETag", "etag", "LastModified", "last_modified",
    "checksum", "md5Hash", "version_id",
)  # fmt: skip
_WEIGHTS = (".safetensors", ".bin", ".gguf")


Advance = Callable[[int], None]
"""Callback that advances the bar by this many units."""


@contextmanager
def progress_bar(description: str, total: int, *, show: bool = True) -> Generator[Advance]:
    """Show a bar until the body ends, and yield its callback; nothing is shown without a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    hidden = not (show and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=hidden) as display:
        yield partial(display.advance, display.add_task(description, total=total))


def cache_folder(cache_dir: str | Path | None) -> Path:
    """Return the folder for downloads: ``cache_dir``, or ``~/.cache/strop``, with ``~`` expanded."""
    return Path(expand(cache_dir or DEFAULT_CACHE_DIR))


def local_path(url: str | Path, cache_dir: str | Path | None = None) -> Path:
    """Return a local path with the content of ``url``; a file or a folder.

    A path without a scheme is returned with ``~`` expanded; it need not exist (it may be a model name on a
    hub). A URL is downloaded below ``cache_dir/downloads``, once per version of its content as reported by
    the file system (sizes, times, entity tags). The copy appears by a rename and under a lock, so a failed
    download leaves nothing, and other processes wait for the first one instead of downloading again. A copy
    that is not what was downloaded is replaced; weights are compared by size only, and by digest where they
    are loaded, as processes share that work.

    Raises :class:`DataError` when the URL cannot be found, read or written, or lists a name that leads out of
    the folder.
    """
    if not is_url(url):
        return Path(expand(url))
    url = str(url)
    fs, remote = open_filesystem(url)
    with _io_errors(url):
        info = fs.info(remote)
        files = files_below(fs, remote) if info["type"] == "directory" else {"": info}
    if not files:
        raise DataError(f"{url}: the folder is empty")
    if isinstance(fs, LocalFileSystem):
        return Path(remote)
    downloads = cache_folder(cache_dir) / manifest.DOWNLOADS
    folder = downloads / _version_key(url, files)
    name = PurePosixPath(remote.rstrip("/")).name or "root"
    with _io_errors(url):
        downloads.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not (folder.exists() and _is_unchanged(folder)):
                shutil.rmtree(folder, ignore_errors=True)
                # buckets may list a folder itself, with a slash at the end
                names = {info["name"]: f"{name}/{path}".rstrip("/") for path, info in files.items()}
                with atomic_folder(folder) as building:
                    copy_files(fs, names, building, url)
                    if name != manifest.MANIFEST:  # a data file may have this name
                        manifest.write(building, manifest.describe(building))
    return folder / name


def _is_unchanged(folder: Path) -> bool:
    try:
        found = manifest.covering(folder)
        manifest.require_sizes(str(folder), found, manifest.sizes(folder, found))
        small = {name: entry for name, entry in found.items() if not name.endswith(_WEIGHTS)}
        manifest.require_unchanged(str(folder), folder, small)
    except CheckpointError as error:
        logger.warning("warning: %s: it is downloaded again", error)
        return False
    return True


def copy_files(fs: Any, files: Mapping[str, str], folder: Path, where: str) -> None:
    """Copy remote paths of ``fs`` to the given names below ``folder``, with a progress bar in bytes.

    Raises :class:`DataError` before the first copy for a name in ``where`` that leads out of ``folder``.
    """
    targets = {
        remote: folder / manifest.require_below(name, where, DataError) for remote, name in files.items()
    }
    total = sum(int(fs.info(remote).get("size") or 0) for remote in files)
    with progress_bar("downloading", total) as advance:
        for remote, target in targets.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            fs.get_file(remote, str(target), callback=_Bytes(advance))


def open_filesystem(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of ``url`` and the path inside it.

    Raises :class:`DataError` when fsspec has no back-end for the URL.
    """
    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError, OSError) as error:
        # The first line only: pyarrow's message for a missing Java runtime has a hundred.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"{url}: cannot open this file system ({reason}). fsspec needs the back-end's package, "
            "for example s3fs for s3://, gcsfs for gs://, a Hadoop client for hdfs://"
        ) from error


@contextmanager
def _io_errors(url: str) -> Generator[None]:
    """Turn file system errors of the body into a :class:`DataError` that names the URL."""
    try:
        yield
    except StropError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{url}: no such file or folder") from error
    except Exception as error:  # back-ends raise their own types: botocore's, aiohttp's, pyarrow's, OSError
        raise DataError(f"{url}: cannot be copied: {type(error).__name__}: {error}") from error


def files_below(fs: Any, folder: str) -> dict[str, dict[str, Any]]:
    """Return relative path -> info for every file below ``folder``, a path of ``open_filesystem``."""
    found, root = fs.find(folder, detail=True), folder.rstrip("/")
    return {path[len(root) :].lstrip("/"): info for path, info in sorted(found.items())}


def _version_key(url: str, files: dict[str, dict[str, Any]]) -> str:
    versions = {
        name: {fact: str(info[fact]) for fact in _VERSION_FACTS if info.get(fact) is not None}
        for name, info in files.items()
    }
    return hashlib.sha256(json.dumps([url, versions], sort_keys=True).encode()).hexdigest()[:32]


class _Bytes(Callback):
    """fsspec callback that passes byte counts to a progress bar."""

    def __init__(self, advance: Advance) -> None:
        super().__init__()
        self._advance = advance

    def relative_update(self, inc: int = 1) -> None:
        self._advance(inc)
