"""The typed configuration tree, one module for each owner; `Config` is its root."""

from __future__ import annotations

from strop.config.schema.root import Config

__all__ = ["Config"]
