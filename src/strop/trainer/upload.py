"""Copies of whole local checkpoints to a remote folder, made by a thread while training goes on."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strop.data.fetch import progress_bar
from strop.errors import CheckpointError
from strop.trainer.manifest import MANIFEST, parse_manifest
from strop.trainer.remote import RemoteCheckpoints

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
