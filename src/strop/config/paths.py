"""Paths in the configuration: local ones, which may begin with `~`, URLs, and hub names."""

from __future__ import annotations

import os
import re
from pathlib import Path

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


def is_url(path: str | Path) -> bool:
    """Return True if `path` is fetched through fsspec (hdfs://, s3://, ...), not read from a local disk."""
    return "://" in str(path)


def expand(path: str | Path) -> str:
    """Return `path` with a leading `~` expanded; URLs and hub names (Qwen/Qwen2.5-0.5B) are unchanged.

    The `~` of an unknown user stays, as in shells; `Path.expanduser` would raise.
    """
    return str(path) if is_url(path) else os.path.expanduser(path)


def may_be_a_hub_name(path: str) -> bool:
    """Return True if `path` may name a model on the hub (owner/name); local folders take precedence."""
    return _HUB_NAME.fullmatch(path) is not None and not path.endswith(".gguf")
