"""Checkpoints in a folder that fsspec reaches: hdfs://, s3://, gs://, memory://, file://, or a plain path.

A remote checkpoint is whole when its manifest is there: the manifest is written last and removed first. The
name of the latest one is written after that, and is only a hint: when it is missing, cut off or names a
checkpoint that is not whole, the newest whole one counts.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsspec.callbacks import Callback
from fsspec.implementations.local import LocalFileSystem

from strop.checkpoint.folder import LATEST, MANIFEST, PREFIX, parse_manifest, require_sizes
from strop.config.paths import expand
from strop.data.fetch import open_filesystem, progress_bar
from strop.errors import CheckpointError

Advance = Callable[[int], None]


class RemoteCheckpoints:
    """The ``global_step_N`` folders below one URL."""

    def __init__(self, url: str) -> None:
        self.url = expand(url).rstrip("/")
        self._fs, root = open_filesystem(self.url)
        self._root = root.rstrip("/")

    def is_folder(self, folder: Path) -> bool:
        """Whether this is the local folder ``folder`` under another name."""
        return isinstance(self._fs, LocalFileSystem) and Path(self._root).resolve() == folder.resolve()

    def url_of(self, step: int) -> str:
        """Where the checkpoint of iteration ``step`` lies."""
        return f"{self.url}/{PREFIX}{step}"

    def is_whole(self, step: int) -> bool:
        """Whether the checkpoint of iteration ``step`` has a whole manifest."""
        return _manifest(self._fs, f"{self._root}/{PREFIX}{step}") is not None

    def latest(self) -> int | None:
        """The iteration to resume from: the one that the remote folder names, or the newest whole one."""
        candidates = sorted(self._steps(), reverse=True)
        try:
            named = self._fs.cat_file(f"{self._root}/{LATEST}").decode()
        except FileNotFoundError:
            named = ""
        if named.endswith("\n") and named.strip().isdigit():  # else it is the beginning of a number
            candidates.insert(0, int(named))
        return next(filter(self.is_whole, candidates), None)

    def upload(self, checkpoint: Path, *, uploaded: set[str], advance: Advance) -> None:
        """Copy a whole local checkpoint; files in ``uploaded`` are there from an attempt that failed.

        ``uploaded`` grows with every file, ``advance`` is told of bytes. Raises whatever the file system
        raises, and ``CheckpointError`` when a file did not arrive with its size.
        """
        remote = f"{self._root}/{checkpoint.name}"
        if not uploaded:
            self._remove(checkpoint.name)  # an earlier run's, or one whose upload was cut off
        manifest = (checkpoint / MANIFEST).read_bytes()
        sizes = parse_manifest(manifest) or {}
        for name, size in sizes.items():
            if name in uploaded:
                continue
            self._fs.makedirs(f"{remote}/{name}".rpartition("/")[0], exist_ok=True)
            count = _Counter(advance)
            self._fs.put_file(str(checkpoint / name), f"{remote}/{name}", callback=count)
            advance(size - count.total)  # some file systems report nothing
            uploaded.add(name)
        require_sizes(self.url, sizes, _sizes(self._fs, remote))
        self._fs.pipe_file(f"{remote}/{MANIFEST}", manifest)
        self._fs.pipe_file(f"{self._root}/{LATEST}", f"{checkpoint.name.removeprefix(PREFIX)}\n".encode())

    def prune(self, max_to_keep: int, *, newest: int) -> None:
        """Keep the last ``max_to_keep`` whole checkpoints up to iteration ``newest``, and nothing else.

        Later ones are of a run that was taken up again from an earlier checkpoint.
        """
        steps = sorted(self._steps(), reverse=True)
        kept = [step for step in steps if step <= newest and self.is_whole(step)][:max_to_keep]
        for step in steps:
            if step not in kept:
                self._remove(f"{PREFIX}{step}")

    def archive(self) -> str | None:
        """Move the checkpoints that are there into ``previous_1``, ``previous_2``, ...; returns its URL."""
        names = [LATEST] if self._fs.exists(f"{self._root}/{LATEST}") else []
        names += [f"{PREFIX}{step}" for step in self._steps()]
        if not names:
            return None
        number = 1
        while self._fs.exists(f"{self._root}/previous_{number}"):
            number += 1
        archive = f"{self._root}/previous_{number}"
        self._fs.makedirs(archive)
        for name in names:
            self._fs.mv(f"{self._root}/{name}", f"{archive}/{name}", recursive=True)
        return f"{self.url}/previous_{number}"

    def _steps(self) -> list[int]:
        """The iterations of all folders, whole or not."""
        self._fs.invalidate_cache()
        try:
            paths = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        names = (path.rstrip("/").rpartition("/")[2].removeprefix(PREFIX) for path in paths)
        return [int(name) for name in names if name.isdigit()]

    def _remove(self, name: str) -> None:
        """Remove a checkpoint, so that it is not whole from the first moment on."""
        self._fs.invalidate_cache()
        for path in (f"{self._root}/{name}/{MANIFEST}", f"{self._root}/{name}"):
            if self._fs.exists(path):
                self._fs.rm(path, recursive=path.endswith(name))


def download(url: str, target: Path, *, wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Copy the files of the remote checkpoint ``url`` for which ``wanted(relative path)``, but its manifest.

    ``CheckpointError`` when it is not whole, cannot be read, or a file arrives with another size.
    """
    fs, remote = open_filesystem(url)
    remote = remote.rstrip("/")
    sizes = {name: size for name, size in read_manifest(url).items() if wanted(name)}
    try:
        with progress_bar(f"downloading {url}", sum(sizes.values())) as bar:
            for name, size in sizes.items():
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                count = _Counter(bar.advance)
                fs.get_file(f"{remote}/{name}", str(target / name), callback=count)
                bar.advance(size - count.total)
    except Exception as error:  # each back-end raises its own kinds: botocore's, pyarrow's, OSError
        raise CheckpointError(f"{url} cannot be downloaded: {type(error).__name__}: {error}") from error
    require_sizes(url, sizes, {name: (target / name).stat().st_size for name in sizes})


def read_manifest(url: str) -> dict[str, int]:
    """The manifest of a remote checkpoint; ``CheckpointError`` when it is not whole."""
    fs, remote = open_filesystem(url)
    try:
        sizes = _manifest(fs, remote.rstrip("/"))
    except Exception as error:  # as above
        raise CheckpointError(f"{url} cannot be read: {type(error).__name__}: {error}") from error
    if sizes is None:
        raise CheckpointError(
            f"{url} is not a whole checkpoint: it has no {MANIFEST} (an upload that was cut off, or another "
            "kind of folder); give the URL of a global_step_N folder"
        )
    return sizes


def _manifest(fs: Any, folder: str) -> dict[str, int] | None:
    try:
        return parse_manifest(fs.cat_file(f"{folder}/{MANIFEST}"))
    except FileNotFoundError:
        return None


def _sizes(fs: Any, folder: str) -> dict[str, int | None]:
    """Relative path -> bytes, for every file below ``folder``."""
    fs.invalidate_cache()
    root = fs._strip_protocol(folder).rstrip("/")
    found = fs.find(folder, detail=True)
    return {path[len(root) :].lstrip("/"): facts["size"] for path, facts in found.items()}


class _Counter(Callback):
    """Passes fsspec's byte counts on and remembers their sum."""

    def __init__(self, advance: Advance) -> None:
        super().__init__()
        self.total = 0
        self._advance = advance

    def relative_update(self, inc: int = 1) -> None:
        self.total += inc
        self._advance(inc)


# Copies of whole local checkpoints to a remote folder, made by a thread while training goes on.

logger = logging.getLogger(__name__)


_RETRY_AFTER_S = (5.0, 20.0, 60.0)

_SAY_EVERY_S = 30.0

_LOOK_EVERY_S = 0.2


@dataclass(frozen=True)
class _Upload:
    step: int
    checkpoint: Path
    only_if_missing: bool

    @property
    def size(self) -> int:
        """Bytes, by the manifest."""
        return sum((parse_manifest((self.checkpoint / MANIFEST).read_bytes()) or {}).values())


class Uploader:
    """Uploads one checkpoint after the other, each tried ``1 + len(retry_after_s)`` times.

    A failure is a warning at once and an error in ``close``.
    """

    def __init__(
        self,
        remote: RemoteCheckpoints,
        *,
        max_to_keep: int | None = None,
        retry_after_s: Sequence[float] = _RETRY_AFTER_S,
    ) -> None:
        self.remote = remote
        self._max_to_keep = max_to_keep
        self._retry_after_s = retry_after_s
        self._changed = threading.Condition()
        self._waiting: list[_Upload] = []
        self._current: _Upload | None = None
        self._closed = threading.Event()
        self._bytes_done = 0
        self._failures: dict[Path, str] = {}
        self._thread: threading.Thread | None = None

    def submit(self, step: int, checkpoint: Path, *, only_if_missing: bool = False) -> None:
        """Upload a whole checkpoint after those that wait; ``only_if_missing``: unless it is there whole."""
        with self._changed:
            self._waiting.append(_Upload(step, checkpoint, only_if_missing))
            self._changed.notify_all()
        if self._thread is None:
            # A daemon: the interpreter must be able to end although a file system does not answer.
            self._thread = threading.Thread(target=self._work, name="checkpoint-upload", daemon=True)
            self._thread.start()

    def release(self, checkpoint: Path) -> bool:
        """Forget a checkpoint that waits, so that it may be deleted; False while it is being uploaded."""
        with self._changed:
            self._waiting = [upload for upload in self._waiting if upload.checkpoint != checkpoint]
            return self._current is None or self._current.checkpoint != checkpoint

    def close(self, *, at_most_s: float = math.inf) -> None:
        """Wait until everything is uploaded, and end the thread; ``CheckpointError`` names what is not.

        When the wait is interrupted (Ctrl-C), or not over after ``at_most_s``, the rest is given up. Once
        closed, this returns at once.
        """
        if self._closed.is_set():
            return
        try:
            self._wait(at_most_s)
            for upload in self._left():
                self._failures[upload.checkpoint] = "its upload was cut off"
        finally:
            self.give_up()
        missing = {path: reason for path, reason in self._failures.items() if path.exists()}
        if missing:
            reasons = "; ".join(f"{path.name}: {reason}" for path, reason in missing.items())
            raise CheckpointError(
                f"not uploaded to {self.remote.url}: {reasons}. Nothing is lost: the checkpoints are in "
                f"{next(iter(missing)).parent}; copy them, or start the same command again when "
                "trainer.default_hdfs_dir can be written"
            )

    def give_up(self) -> None:
        """Begin no further upload; the thread ends with the one under way."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()

    def _left(self) -> list[_Upload]:
        with self._changed:
            return [upload for upload in (self._current, *self._waiting) if upload is not None]

    def _wait(self, at_most_s: float) -> None:
        left = self._left()
        if not left:
            return
        total, done = sum(upload.size for upload in left), 0
        deadline = time.monotonic() + at_most_s
        logger.info("waiting for uploads to %s", self.remote.url)
        before = self._bytes_done
        with progress_bar(f"uploading to {self.remote.url}", total) as bar:
            while self._left() and time.monotonic() < deadline:
                time.sleep(_LOOK_EVERY_S)
                bar.advance(self._bytes_done - before - done)
                done = self._bytes_done - before

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self._closed.is_set())
                if self._closed.is_set():
                    return
                self._current = self._waiting.pop(0)
            try:
                self._upload(self._current)
            except Exception as error:  # noqa: BLE001 - each back-end raises its own kinds
                reason = f"{type(error).__name__}: {error}"
                self._failures[self._current.checkpoint] = reason
                logger.warning(
                    "%s was not uploaded to %s (%s); it is whole in %s",
                    self._current.checkpoint.name,
                    self.remote.url,
                    reason,
                    self._current.checkpoint.parent,
                )
            finally:
                with self._changed:
                    self._current = None

    def _upload(self, upload: _Upload) -> None:
        uploaded: set[str] = set()
        report = _Report(upload, self.remote.url)

        def advance(amount: int) -> None:
            self._bytes_done += amount
            report.advance(amount)

        for pause_s in (*self._retry_after_s, None):
            try:
                if upload.only_if_missing and self.remote.is_whole(upload.step):
                    return
                self.remote.upload(upload.checkpoint, uploaded=uploaded, advance=advance)
                # What a resume found missing is no new checkpoint: it makes none superfluous.
                if self._max_to_keep is not None and not upload.only_if_missing:
                    self.remote.prune(self._max_to_keep, newest=upload.step)
                return
            except Exception as error:  # as above
                if pause_s is None or self._closed.is_set():
                    raise
                logger.warning(
                    "uploading %s to %s failed (%s: %s); once more in %g s",
                    upload.checkpoint.name,
                    self.remote.url,
                    type(error).__name__,
                    error,
                    pause_s,
                )
                self._closed.wait(pause_s)


class _Report:
    """Says now and then, in one line, how far a long upload is."""

    def __init__(self, upload: _Upload, url: str) -> None:
        self._name, self._url, self._size = upload.checkpoint.name, url, max(upload.size, 1)
        self._done = 0
        self._said = time.monotonic()

    def advance(self, amount: int) -> None:
        self._done += amount
        if time.monotonic() - self._said > _SAY_EVERY_S:
            self._said = time.monotonic()
            share = min(self._done / self._size, 1.0)
            logger.info(
                "uploading %s to %s: %.0f%% of %.1f GB",
                self._name,
                self._url,
                100 * share,
                self._size / 1e9,
            )
