"""The configuration: typed schema, defaults, loading, and the checks that run before a model is loaded.

Nothing here imports torch, transformers or pyarrow: `strop --help` and `strop check` answer at once.
"""

from __future__ import annotations

from strop.config.schema import Config

__all__ = ["Config"]
