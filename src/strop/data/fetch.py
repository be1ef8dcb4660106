"""Local copies of files and folders that may live anywhere, and writes that happen whole or not at all.

``local_path`` takes what a user may put behind ``data.train_files`` or ``actor_rollout_ref.model.path``: a
local path, ``hdfs://``, ``s3://`` or any other URL for which fsspec has a back-end.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from filelock import FileLock
from fsspec.callbacks import Callback
from fsspec.implementations.local import LocalFileSystem
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from strop.config.paths import is_url
from strop.errors import DataError

# One progress bar for everything slow in this package: on stderr, and only on a terminal.


class Bar:
    """A task of a rich progress display; ``advance`` moves it."""

    def __init__(self, display: Progress, description: str, total: int) -> None:
        self._display = display
        self._task = display.add_task(description, total=total)

    @property
    def is_visible(self) -> bool:
        """Whether anybody sees it."""
        return not self._display.disable

    def advance(self, amount: int = 1) -> None:
        """Count ``amount`` more units as done."""
        self._display.advance(self._task, amount)


@contextmanager
def progress_bar(description: str, total: int, *, show: bool = True) -> Generator[Bar]:
    """Yield a :class:`Bar` that disappears when the work is done; silent when stderr is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    hidden = not (show and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=hidden) as display:
        yield Bar(display, description, total)


DEFAULT_CACHE_DIR = "~/.cache/strop"


# What back-ends call the facts that change when a file's content does.
_VERSION_FACTS = (
    "size", "mtime", "created", "ETag", "etag", "LastModified", "last_modified",
    "checksum", "md5Hash", "version_id",
)  # fmt: skip


def cache_folder(cache_dir: str | Path | None) -> Path:
    """The folder for downloads: ``cache_dir``, or ``~/.cache/strop``, with ``~`` expanded."""
    return Path(cache_dir or DEFAULT_CACHE_DIR).expanduser()


def local_path(url: str | Path, cache_dir: str | Path | None = None) -> Path:
    """A local path with the content of ``url``; a file or a folder.

    A path without a scheme is returned with ``~`` expanded and is not looked at (it may be a model's hub
    name). A URL is downloaded below ``cache_dir/downloads`` once for each version of its content, judged by
    the sizes, times and entity tags that the file system reports. The copy appears by one rename, under a
    lock: a download that fails leaves nothing, and callers in other processes wait for the first one
    instead of repeating it.

    Raises :class:`DataError` when the URL cannot be found, read or written.
    """
    if not is_url(url):
        return Path(url).expanduser()
    url = str(url)
    fs, remote = open_filesystem(url)
    with _io_errors(url):
        files = _remote_files(fs, remote)
    if not files:
        raise DataError(f"{url}: the folder is empty")
    if isinstance(fs, LocalFileSystem):
        return Path(remote)
    downloads = cache_folder(cache_dir) / "downloads"
    folder = downloads / _version_key(url, files)
    name = PurePosixPath(remote.rstrip("/")).name or "root"
    with _io_errors(url):
        downloads.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                _download(fs, files, folder, name)
    return folder / name


def open_filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system of ``url`` and the path inside it; :class:`DataError` without a back-end."""
    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError, OSError) as error:
        # The first line only: pyarrow's message for a missing Java runtime has a hundred.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"{url}: cannot open this file system ({reason}). fsspec needs the back-end's package, "
            "for example s3fs for s3://, gcsfs for gs://, a Hadoop client for hdfs://"
        ) from error


def content_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


@contextmanager
def _io_errors(url: str) -> Generator[None]:
    """Turn what file systems raise into one :class:`DataError` that names the URL."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{url}: no such file or folder") from error
    except (
        Exception
    ) as error:  # each back-end raises its own kinds: botocore's, aiohttp's, pyarrow's, OSError
        raise DataError(f"{url}: cannot be copied: {type(error).__name__}: {error}") from error


def _remote_files(fs: Any, remote: str) -> dict[str, dict[str, Any]]:
    """Relative path -> facts, for every file at or below ``remote``; the path of a single file is empty."""
    facts = fs.info(remote)
    if facts["type"] != "directory":
        return {"": facts}
    found = fs.find(remote, detail=True)
    root = fs._strip_protocol(remote).rstrip("/")
    return {path[len(root) :].lstrip("/"): facts for path, facts in sorted(found.items())}


def _version_key(url: str, files: dict[str, dict[str, Any]]) -> str:
    versions = {
        name: {fact: str(facts[fact]) for fact in _VERSION_FACTS if facts.get(fact) is not None}
        for name, facts in files.items()
    }
    return hashlib.sha256(json.dumps([url, versions], sort_keys=True).encode()).hexdigest()[:32]


class _BytesToBar(Callback):
    """Passes fsspec's byte counts on to a progress bar."""

    def __init__(self, bar: Bar) -> None:
        super().__init__()
        self._bar = bar

    def relative_update(self, inc: int = 1) -> None:
        self._bar.advance(inc)


def _download(fs: Any, files: dict[str, dict[str, Any]], folder: Path, name: str) -> None:
    """Copy ``files`` to ``folder/name``; the caller holds the lock of ``folder``."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # from a process that was killed
    try:
        total = sum(int(facts.get("size") or 0) for facts in files.values())
        with progress_bar(f"downloading {name}", total) as bar:
            for relative, facts in files.items():
                target = partial / name / relative if relative else partial / name
                target.parent.mkdir(parents=True, exist_ok=True)
                fs.get_file(facts["name"], str(target), callback=_BytesToBar(bar))
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
