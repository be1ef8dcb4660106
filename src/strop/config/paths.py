"""Paths as they stand in the configuration: `~`, local, or a URL."""

from __future__ import annotations

import os
import re
from pathlib import Path

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


def is_url(path: str | Path) -> bool:
    """Whether `path` is fetched through fsspec (hdfs://, s3://, ...) rather than read from a local disk."""
    return "://" in str(path)


def expand(path: str) -> str:
    """`path` with a leading `~` spelled out; a URL, or a name such as Qwen/Qwen2.5-0.5B, stays as it is."""
    return path if is_url(path) else os.path.expanduser(path)


def may_be_a_hub_name(path: str) -> bool:
    """Whether `path` could name a model on a hub (owner/name); what is on this disk is looked at first."""
    return _HUB_NAME.fullmatch(path) is not None and not path.endswith(".gguf")
