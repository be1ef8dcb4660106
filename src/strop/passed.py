"""Functions that a Python program passes, by the names that stand for them in the configuration."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

PASSED: dict[str, Callable[..., Any]] = {}
"""``function:<name>-<digest>`` -> the function, in this process; workers on Ray get copies."""


def is_function(name: str) -> bool:
    """Return True if ``name`` stands for a function that a program passes."""
    return name.startswith("function:")


@contextmanager
def passing(functions: Mapping[str, Callable[..., Any]]) -> Generator[None]:
    """Let configurations name ``functions`` in the body."""
    added = functions.keys() - PASSED.keys()
    PASSED.update(functions)
    try:
        yield
    finally:
        for name in added:
            del PASSED[name]
