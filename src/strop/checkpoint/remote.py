"""Checkpoints in a folder that fsspec reaches: hdfs://, s3://, gs://, memory://, file://, or a plain path.

A remote checkpoint is whole if its manifest is there: the manifest is written last and removed first. The
file that names the latest checkpoint is written after the manifest and is only a hint: if it is missing, cut
off or names a checkpoint that is not whole, the newest whole checkpoint is used.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fsspec.implementations.local import LocalFileSystem

from strop.checkpoint.folder import (
    BY_TIME,
    LATEST,
    building_folder,
    latest_checkpoint,
    name_of,
    parse_manifest,
    publish,
    saved_steps,
    seal,
    steps_in,
)
from strop.config.paths import expand, is_url
from strop.data.fetch import copy_files, files_below, open_filesystem
from strop.errors import CheckpointError, ConfigError, StropError, in_one_line, raised_as, write_failure
from strop.files import atomic_folder
from strop.manifest import MANIFEST, Manifest, require_sizes, require_unchanged

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
_RETRY_AFTER_S = (5.0, 20.0, 60.0)


class RemoteCheckpoints:
    """The ``global_step_N`` folders below one URL."""

    def __init__(self, url: str) -> None:
        self.url = expand(url).rstrip("/")
        self._fs, root = open_filesystem(self.url)
        self._root = root.rstrip("/")

    def is_folder(self, folder: Path) -> bool:
        """Return True if this is the local folder ``folder`` under another name."""
        return isinstance(self._fs, LocalFileSystem) and Path(self._root).resolve() == folder.resolve()

    def url_of(self, step: int) -> str:
        """Return the URL of the checkpoint of iteration ``step``."""
        return f"{self.url}/{name_of(step)}"

    def is_whole(self, step: int) -> bool:
        """Return True if the checkpoint of iteration ``step`` has a whole manifest."""
        return _manifest(self._fs, f"{self._root}/{name_of(step)}") is not None

    def holds(self, checkpoint: Path) -> bool:
        """Return True if the whole checkpoint of its iteration is this one, not that of a run left behind.

        Of one without a manifest, which is not whole, any whole copy counts.
        """
        there, file = _manifest(self._fs, f"{self._root}/{checkpoint.name}"), checkpoint / MANIFEST
        if there is None or not file.is_file():
            return there is not None
        return there == parse_manifest(file.read_bytes(), str(checkpoint))

    def latest(self) -> int | None:
        """Return the iteration to resume from: the one that ``LATEST`` names, or the newest whole one."""
        candidates = sorted(self._steps(), reverse=True)
        try:
            named = self._fs.cat_file(f"{self._root}/{LATEST}").decode(errors="replace")
        except FileNotFoundError:
            named = ""
        if named.endswith("\n") and named.strip().isdecimal():  # without the line end, digits may be missing
            candidates.insert(0, int(named))
        return next(filter(self.is_whole, candidates), None)

    def upload(self, checkpoint: Path, *, resume: bool = False, is_latest: bool = True) -> None:
        """Copy a whole local checkpoint, the manifest last.

        ``resume`` keeps files that an earlier attempt copied in full; ``is_latest`` names the checkpoint as
        the one to resume from. Raises whatever the file system raises, and ``CheckpointError`` when a file
        did not arrive with its size.
        """
        remote = f"{self._root}/{checkpoint.name}"
        if not resume:
            self._remove(checkpoint.name)  # left by an earlier run, or by an upload that was cut off
        manifest = (checkpoint / MANIFEST).read_bytes()
        files = parse_manifest(manifest, str(checkpoint)) or {}
        there = _sizes(self._fs, remote) if resume else {}
        names = [name for name, entry in files.items() if there.get(name) != entry.size]
        for folder in sorted({f"{remote}/{name}".rpartition("/")[0] for name in names}):
            self._fs.makedirs(folder, exist_ok=True)
        self._fs.put([str(checkpoint / name) for name in names], [f"{remote}/{name}" for name in names])
        require_sizes(self.url, files, _sizes(self._fs, remote))
        self._fs.pipe_file(f"{remote}/{MANIFEST}", manifest)
        if is_latest:
            (step,) = steps_in([checkpoint.name])
            self._name_latest(step)

    def _name_latest(self, step: int) -> None:
        self._fs.pipe_file(f"{self._root}/{LATEST}", f"{step}\n".encode())

    def go_back(self, step: int) -> None:
        """Name the newest whole checkpoint up to iteration ``step`` as the one to resume from.

        If there is none, the later ones are moved aside, as by ``archive``.
        """
        if (self.latest() or 0) <= step:
            return
        earlier = (found for found in sorted(self._steps(), reverse=True) if found <= step)
        if (newest := next(filter(self.is_whole, earlier), None)) is None:
            self.archive(after=step)
        else:
            self._name_latest(newest)

    def prune(self, max_to_keep: int, *, newest: int, by_time: bool = False) -> None:
        """Keep the last ``max_to_keep`` whole checkpoints up to iteration ``newest``; remove earlier ones.

        Whole later ones stay, of a continuation that was left, or that another machine has trained. With
        ``by_time`` whole ones that were not saved by time stay.
        """
        steps = sorted(self._steps(), reverse=True)
        whole = [step for step in steps if self.is_whole(step)]
        stay = [step for step in whole if step > newest or (by_time and not self._is_by_time(step))]
        kept = [step for step in whole if step not in stay][:max_to_keep]
        for step in steps:
            if step not in kept and step not in stay:
                self._remove(name_of(step))

    def _is_by_time(self, step: int) -> bool:
        return self._fs.exists(f"{self._root}/{name_of(step)}/{BY_TIME}")

    def archive(self, *, after: int = -1) -> str | None:
        """Move the checkpoints ``after`` an iteration to ``previous_1``, ``previous_2``, ...

        Returns the URL, None if there are none.
        """
        names = [LATEST] if self._fs.exists(f"{self._root}/{LATEST}") else []
        names += [name_of(step) for step in self._steps() if step > after]
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
        """Return the iterations of all checkpoint folders, whole or not."""
        self._fs.invalidate_cache()
        try:
            paths = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return steps_in(path.rstrip("/").rpartition("/")[2] for path in paths)

    def _remove(self, name: str) -> None:
        """Remove a checkpoint, its manifest first, so that a half-removed one does not count as whole."""
        self._fs.invalidate_cache()
        for path in (f"{self._root}/{name}/{MANIFEST}", f"{self._root}/{name}"):
            if self._fs.exists(path):
                self._fs.rm(path, recursive=path.endswith(name))


def download(url: str, target: Path, *, wanted: Callable[[str], bool] = lambda name: True) -> Manifest:
    """Copy the files of the remote checkpoint ``url`` for which ``wanted(relative path)``, without manifest.

    Returns the manifest's entries of these files. Raises ``CheckpointError`` when the checkpoint is not whole
    or cannot be read, or a file arrives with another size or content.
    """
    fs, remote = open_filesystem(url)
    remote = remote.rstrip("/")
    files = {name: entry for name, entry in read_manifest(url).items() if wanted(name)}

    def copy() -> None:
        there = {name: (target / name).stat().st_size for name in files if (target / name).is_file()}
        left = [name for name, entry in files.items() if there.get(name) != entry.size]
        copy_files(fs, {f"{remote}/{name}": name for name in left}, target, url)

    with raised_as(CheckpointError, f"{url} cannot be downloaded"):
        _retried(f"the download of {url}", copy)
    require_unchanged(url, target, files, remedy="; copy the checkpoint again, or use another one")
    return files


def read_manifest(url: str) -> Manifest:
    """Return the manifest of a remote checkpoint; ``CheckpointError`` when it is not whole."""
    fs, remote = open_filesystem(url)
    with raised_as(CheckpointError, f"{url} cannot be read"):
        found = _retried(f"reading {url}", lambda: _manifest(fs, remote.rstrip("/")))
    if found is None:
        raise CheckpointError(
            f"{url} is not a whole checkpoint: it has no {MANIFEST} (an upload was cut off, or it is another "
            "kind of folder); give the URL of a global_step_N folder"
        )
    return found


def _retried(
    what: str,
    attempt: Callable[[], Result],
    *,
    pauses: Iterable[float] | None = None,
    wait: Callable[[float], Any] = time.sleep,
    final: tuple[type[Exception], ...] = (StropError, FileNotFoundError, PermissionError),
) -> Result:
    """Return the result of ``attempt``, which is repeated after each of ``pauses``, if that may help.

    Errors of the types ``final``, and that of a full disk here, are raised at once, others at the end.
    """
    left = iter(_RETRY_AFTER_S if pauses is None else pauses)
    while True:
        try:
            return attempt()
        except final:
            raise
        except Exception as error:
            if write_failure(error) != " ".join(str(error).split()) or (pause_s := next(left, None)) is None:
                raise
            logger.warning("%s failed (%s); retry in %g s", what, in_one_line(error), pause_s)
            wait(pause_s)


def _manifest(fs: Any, folder: str) -> Manifest | None:
    try:
        return parse_manifest(fs.cat_file(f"{folder}/{MANIFEST}"), folder)
    except FileNotFoundError:
        return None


def _sizes(fs: Any, folder: str) -> dict[str, int | None]:
    """Return relative path -> bytes for every file below ``folder``."""
    fs.invalidate_cache()
    return {name: info["size"] for name, info in files_below(fs, folder).items()}


def find_checkpoint(
    folder: Path,
    resume_mode: str,
    remote: RemoteCheckpoints | None,
    require_same: Callable[[Path], None] | None = None,
) -> Path | None:
    """Return the checkpoint that ``trainer.resume_mode`` selects, or None for a fresh start.

    ``disable`` selects none. ``auto`` selects the latest of the run folder, or that of ``remote`` if it is
    later, as of a run that went on elsewhere: it is downloaded and becomes the latest of the run folder.
    Otherwise a path, or the URL of a ``global_step_N`` folder, which is downloaded into
    ``<folder>/downloaded``.

    ``require_same`` raises ``ConfigError`` for a downloaded checkpoint of another run, before it replaces
    anything.
    """
    if resume_mode == "disable":
        return None
    if resume_mode == "auto":
        found = latest_checkpoint(folder)
        if found is not None and not found.is_dir():
            there = [str(folder / name_of(step)) for step in saved_steps(folder)]
            newest = there[-1] if there else f"the latest of {remote.url}" if remote is not None else None
            raise CheckpointError(
                f"{folder / LATEST} names {found.name}, which is not there. Remove that file to "
                + (f"go on from the newest that is: {newest}" if newest else "start from the beginning")
            )
        return found if remote is None else _fetch_later(folder, remote, found, require_same)
    if is_url(resume_mode):
        return _fetch_named(folder, resume_mode.rstrip("/"))
    return Path(expand(resume_mode))


def _fetch_later(
    folder: Path,
    remote: RemoteCheckpoints,
    found: Path | None,
    require_same: Callable[[Path], None] | None,
) -> Path | None:
    """Return a copy of the latest remote checkpoint, or ``found`` in the run folder if that is as late.

    One that is in the run folder, too, was left behind: the user has named an earlier one as the latest.
    """
    what = f"{remote.url} cannot be searched for a checkpoint to resume from"
    try:
        with raised_as(CheckpointError, what, remedy="set trainer.resume_mode=disable to start from scratch"):
            step = _retried(f"the search of {remote.url}", remote.latest)
    except CheckpointError as error:
        if found is None:
            raise
        logger.warning("%s; the run goes on from %s", error, found)
        return found
    if step is None or (found is not None and step <= max(saved_steps(folder))):
        return found
    if found is not None:
        logger.info("%s has %s, later than %s: the run goes on from it", remote.url, name_of(step), found)
    building = building_folder(folder, step)
    shutil.rmtree(building, ignore_errors=True)
    seal(building, download(remote.url_of(step), building))
    if found is not None and require_same is not None:
        try:
            require_same(building)
        except ConfigError as error:
            raise ConfigError(
                f"trainer.default_hdfs_dir={remote.url} has {name_of(step)}, which is later than {found} and "
                f"of another run: set it to a folder of this run alone ({error})"
            ) from error
    return publish(folder, step)


def _fetch_named(folder: Path, url: str) -> Path:
    """Return a local copy of a remote checkpoint; a copy with the same manifest is used again."""
    manifest = read_manifest(url)
    key = hashlib.sha256(f"{url} {manifest}".encode()).hexdigest()[:16]
    home = folder / "downloaded" / key
    name = url.rpartition("/")[2]
    if not home.exists():
        shutil.rmtree(home.parent, ignore_errors=True)  # a download that was cut off, or another checkpoint
        with atomic_folder(home) as building:
            seal(building / name, download(url, building / name))
    return home / name


@dataclass(frozen=True)
class _Upload:
    step: int
    checkpoint: Path
    only_if_missing: bool
    is_latest: bool


class Uploader:
    """Upload whole local checkpoints one after another in a background thread.

    Each is tried ``1 + len(retry_after_s)`` times where a retry may help. A failure is logged as a warning at
    once and raised by ``close``.
    """

    def __init__(
        self,
        remote: RemoteCheckpoints,
        *,
        max_to_keep: int | None = None,
        by_time: bool = False,
        retry_after_s: Sequence[float] = _RETRY_AFTER_S,
    ) -> None:
        self.remote = remote
        self._max_to_keep, self._by_time = max_to_keep, by_time
        self._retry_after_s = retry_after_s
        self._changed = threading.Condition()
        self._waiting: list[_Upload] = []
        self._current: _Upload | None = None
        self._closed = threading.Event()
        self._failures: dict[Path, str] = {}
        self._thread: threading.Thread | None = None

    def submit(
        self, step: int, checkpoint: Path, *, only_if_missing: bool = False, is_latest: bool = True
    ) -> None:
        """Enqueue a whole checkpoint; ``only_if_missing`` skips it if the remote one is whole."""
        with self._changed:
            self._waiting.append(_Upload(step, checkpoint, only_if_missing, is_latest))
            self._changed.notify_all()
        if self._thread is None:
            # A daemon, and no executor: the interpreter must be able to exit while a file system hangs.
            self._thread = threading.Thread(target=self._work, name="checkpoint-upload", daemon=True)
            self._thread.start()

    def release(self, checkpoint: Path) -> bool:
        """Drop a waiting checkpoint so that it may be deleted; return False while it is being uploaded."""
        with self._changed:
            self._waiting = [upload for upload in self._waiting if upload.checkpoint != checkpoint]
            return self._current is None or self._current.checkpoint != checkpoint

    def close(self, *, at_most_s: float | None = None) -> None:
        """Wait for all uploads and end the thread; ``CheckpointError`` names what was not uploaded.

        An interrupt of the wait (Ctrl-C) or its end after ``at_most_s`` cancels the rest. A second call
        returns at once.
        """
        if self._closed.is_set():
            return
        try:
            with self._changed:
                if left := self._left():
                    names = ", ".join(upload.checkpoint.name for upload in left)
                    logger.info("waiting for the upload of %s to %s", names, self.remote.url)
                self._changed.wait_for(lambda: not self._left(), at_most_s)
                self._failures |= {upload.checkpoint: "its upload was cut off" for upload in self._left()}
        finally:
            self.cancel()
        missing = {path: reason for path, reason in self._failures.items() if path.exists()}
        if missing:
            reasons = "; ".join(f"{path.name}: {reason}" for path, reason in missing.items())
            raise CheckpointError(
                f"not uploaded to {self.remote.url}: {reasons}. Nothing is lost: the checkpoints are in "
                f"{next(iter(missing)).parent}; copy them, or run the same command again when "
                "trainer.default_hdfs_dir can be written"
            )

    def cancel(self) -> None:
        """Start no further upload; the thread ends after the current one."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()

    def _left(self) -> list[_Upload]:
        return [upload for upload in (self._current, *self._waiting) if upload is not None]

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self._closed.is_set())
                if self._closed.is_set():
                    return
                self._current = upload = self._waiting.pop(0)
            try:
                self._upload(upload)
            finally:
                with self._changed:
                    self._current = None
                    self._changed.notify_all()

    def _upload(self, upload: _Upload) -> None:
        attempts = itertools.count()

        def copy() -> None:
            if upload.only_if_missing and self.remote.holds(upload.checkpoint):
                return
            self.remote.upload(upload.checkpoint, resume=next(attempts) > 0, is_latest=upload.is_latest)
            # A checkpoint that a resume found missing is not new, so it makes no older one superfluous.
            if self._max_to_keep is not None and not upload.only_if_missing:
                self.remote.prune(self._max_to_keep, newest=upload.step, by_time=self._by_time)

        what = f"the upload of {upload.checkpoint.name} to {self.remote.url}"
        pauses = itertools.takewhile(lambda _: not self._closed.is_set(), self._retry_after_s)
        try:  # nothing is final: hours of training hang on it, and credentials are renewed meanwhile
            _retried(what, copy, pauses=pauses, wait=self._closed.wait, final=())
        except Exception as error:  # noqa: BLE001 - back-ends raise their own types
            self._failures[upload.checkpoint] = reason = in_one_line(error)
            logger.warning("%s failed (%s); %s is whole", what, reason, upload.checkpoint)
        else:
            self._failures.pop(upload.checkpoint, None)
