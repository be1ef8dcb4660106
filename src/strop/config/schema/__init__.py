"""The typed configuration trees, one module for each owner; `Config` is the root of the largest."""

from __future__ import annotations

from strop.config.schema.root import Config, RootConfig

__all__ = ["Config", "RootConfig"]
