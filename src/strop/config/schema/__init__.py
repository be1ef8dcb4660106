"""Typed configuration trees, one module per owner; `Config` is the root of reinforcement learning."""

from __future__ import annotations

from strop.config.schema.root import Config, RootConfig

__all__ = ["Config", "RootConfig"]
