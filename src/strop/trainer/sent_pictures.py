"""Pictures that worker groups hold, for as long as calls name them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from strop import pictures
from strop.protocol import DataProto


class SentPictures:
    """Send the pictures of batches to groups, each once, and drop them there.

    Those that are files are sent as paths if every machine sees the first of them, else as their content.
    Nothing but the answer to that is awaited: calls to a group run in order.
    """

    def __init__(self, groups: Iterable[Any]) -> None:
        self._groups = [*{id(group): group for group in groups if group is not None}.values()]
        self._last: dict[int, int] = {}
        """Digest of each picture that the groups hold -> the last number that it was sent with."""
        self._sees_paths: bool | None = None
        """True if all processes of the groups see the data set's files; None: not known yet."""

    def send(self, batch: DataProto, number: int = 0) -> None:
        """Have the groups hold the pictures of a batch until ``drop`` of this number, or of a later one."""
        columns = [batch.batch[name] for name in ("images", "images_at") if name in batch.batch]
        digests = {digest for column in columns for digest in column[column > 0].tolist()}
        if new := digests - self._last.keys():
            files = pictures.files(new)
            path = next((one.file for one in files.values() if isinstance(one.file, Path)), None)
            if path is not None and self._sees_paths is None:
                self._sees_paths = not any(group.nodes_without(path) for group in self._groups)
            if path is not None and not self._sees_paths:
                files = pictures.with_contents(files)
            for group in self._groups:
                group.hold_pictures.start(files)
        self._last |= {digest: max(number, self._last.get(digest, 0)) for digest in digests}

    def drop(self, number: int) -> None:
        """Drop the pictures that were last sent with this number, or with an earlier one."""
        if old := [digest for digest, last in self._last.items() if last <= number]:
            for group in self._groups:
                group.forget_pictures.start(old)
            for digest in old:
                del self._last[digest]
