"""Typed configuration trees, one module per owner; `Config` is the root of reinforcement learning."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strop.config.schema.root import Config, RootConfig

__all__ = ["Config", "RootConfig"]


def __getattr__(name: str) -> Any:
    """Import the trees on first use: they are composed of back-ends' keys, which import this package."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("strop.config.schema.root"), name)
