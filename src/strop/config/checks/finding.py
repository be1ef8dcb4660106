"""What a rule reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from strop.config.schema import Config

Level = Literal["error", "warning"]


class Finding(NamedTuple):
    """One line of the report."""

    level: Level
    text: str


Rule = Callable[[Config], Iterator[Finding]]
"""A rule looks at one matter and yields what is wrong with it."""


def error(text: str) -> Finding:
    """Something that must be put right before the run."""
    return Finding("error", text)


def warning(text: str) -> Finding:
    """Something that is allowed, and perhaps not meant."""
    return Finding("warning", text)
