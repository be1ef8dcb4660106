"""The report line of a rule."""

from __future__ import annotations

from typing import Literal, NamedTuple

Level = Literal["error", "warning"]


class Finding(NamedTuple):
    """One line of the report."""

    level: Level
    text: str


def error(text: str) -> Finding:
    """Return a finding that stops the run."""
    return Finding("error", text)


def warning(text: str) -> Finding:
    """Return a finding that is allowed, and perhaps a mistake."""
    return Finding("warning", text)
