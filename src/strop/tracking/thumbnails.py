"""Small copies of the pictures of samples, for the page of a run."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from strop import pictures
from strop.errors import StropError
from strop.files import atomic_path

logger = logging.getLogger(__name__)

PICTURES = "pictures"
"""Folder in the run folder."""


class Thumbnails:
    """Write the thumbnails of samples as JPEG files, each picture once, in a thread beside the run.

    Those that no file of samples names any more are deleted from time to time.
    """

    def __init__(self, run_folder: Path) -> None:
        self._run, self._folder = run_folder, run_folder / PICTURES
        self._thread = ThreadPoolExecutor(1, "thumbnails")
        self._has_failed, self._clean_from = False, 1000

    def add(self, samples: pa.Table) -> None:
        """Write those of samples that were written to a file; failing is a warning, once."""
        if "images" in samples.column_names:
            self._thread.submit(self._write, _names(samples["images"]))

    def of(self, names: Sequence[str]) -> list[Path]:
        """Return the files of pictures that were added, as soon as they are written."""
        self._thread.submit(int).result()  # behind all that is under way
        return [path for name in names if (path := self._path(name)).exists()]

    def close(self) -> None:
        """Wait for the thread."""
        self._thread.shutdown()

    def _write(self, names: set[str]) -> None:
        with self._warned():
            there = {path.stem for path in self._folder.glob("*.jpg")}
            for name in names - there:
                with self._warned(), atomic_path(self._path(name), durable=False) as temporary:
                    temporary.write_bytes(pictures.thumbnail(int(name, 16)))
            if len(there | names) > self._clean_from:
                self._clean(there | names)

    @contextmanager
    def _warned(self) -> Generator[None]:
        """Warn of an error of the body, the first time."""
        try:
            yield
        except (OSError, StropError, pa.ArrowException) as error:
            if not self._has_failed:
                logger.warning("warning: the page will lack pictures of samples (%s)", error)
            self._has_failed = True

    def _clean(self, there: set[str]) -> None:
        """Delete thumbnails without a sample; twice as many as are left, and 1000, are there next time."""
        named: set[str] = set()
        for path in self._run.glob("*/step_*.parquet"):
            with pq.ParquetFile(path) as file:
                if "images" in file.schema_arrow.names:
                    named |= _names(file.read(["images"])["images"])
        for name in there - named:
            self._path(name).unlink(missing_ok=True)
        self._clean_from = 2 * len(there & named) + 1000

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.jpg"


def _names(images: pa.ChunkedArray) -> set[str]:
    return set(images.combine_chunks().flatten().to_pylist())
