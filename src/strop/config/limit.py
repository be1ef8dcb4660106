"""What a limit is: some keys, and when this version does not honour them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

Level = Literal["warning", "error"]


@dataclass(frozen=True)
class Limit:
    """Some keys that are not honoured when `applies(config, value)`."""

    keys: tuple[str, ...]
    """Full paths, with `*` for any text; a tree has some of them or none."""
    when: str
    """The condition in words, for the reference page."""
    applies: Callable[[Any, Any], bool]
    """Of a configuration that has the key, and its value there."""
    level: Level
    reason: str
    explains: bool = True
    """Whether the reference page needs the reason beside the condition."""
    may_be_copied: bool = False
    """Whether a default in a file says nothing: a file may be a copy of the reference, which has them all."""

    def covers(self, path: str) -> bool:
        """Whether it is about the key ``path``."""
        return any(fnmatchcase(path, pattern) for pattern in self.keys)
