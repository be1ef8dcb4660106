"""The keys that this version does not honour in a run, and in general.

`check` takes its lines from here, and docs/config.md its column. A value that names what happens anyway, and
a default, are not reported.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from strop.config.keys import all_keys, value_at
from strop.config.limit import Limit
from strop.config.limits import LIMITS
from strop.config.load import load_tree
from strop.config.schema import RootConfig
from strop.config.trees import Tree, tree_of


def unsupported(config: RootConfig) -> tuple[list[str], list[str]]:
    """Errors, one for each key, and warnings, one for each reason with all its keys that the user wrote.

    A default that has no effect is nobody's mistake; docs/config.md says it.
    """
    errors: dict[str, str] = {}
    by_reason: dict[str, list[str]] = {}
    explained: set[str] = set()
    leaves = [path for path, key in all_keys(type(config)).items() if not key.is_section]
    for limit in LIMITS:
        for path in filter(limit.covers, leaves):
            value = value_at(config, path)
            if not limit.applies(config, value):
                continue
            if limit.level == "error":
                errors[path] = f"{path}={value}: {limit.reason}"
            elif path not in explained:
                explained.add(path)  # the first reason is the best one
                if _is_meant(config, path, limit):
                    by_reason.setdefault(limit.reason, []).append(path)
    warnings = []
    for reason, paths in by_reason.items():
        if keys := [f"{path}={value_at(config, path)}" for path in paths if path not in errors]:
            warnings.append(f"no effect ({reason}): {', '.join(keys)}")
    return list(errors.values()), warnings


def _is_meant(config: RootConfig, path: str, limit: Limit) -> bool:
    """Whether somebody counts on what the key says."""
    if config.written is not None and not _holds(config.written, path):
        return False
    if not limit.may_be_copied or _holds(config.overridden, path):
        return True
    return value_at(config, path) != _default(config, path)


def _holds(written: Collection[str], path: str) -> bool:
    """Whether a key, or one in the mapping that it holds, is among those that were written."""
    return path in written or any(other.startswith(f"{path}.") for other in written)


def _default(config: RootConfig, path: str) -> Any:
    """The value that the key has where nobody writes it, beside the other values of `config`."""
    tree = tree_of(config)
    raw: Any = _raw_defaults(tree)
    for word in path.split("."):
        raw = raw[word]
    if isinstance(raw, str) and raw.startswith("${") and raw.endswith("}"):
        return value_at(config, raw[2:-1])
    return value_at(_default_config(tree), path)


@cache
def _raw_defaults(tree: Tree[Any]) -> Any:
    return OmegaConf.to_container(tree.defaults(), resolve=False)


@cache
def _default_config(tree: Tree[Any]) -> RootConfig:
    return load_tree(tree)


def status_in_words(path: str) -> str:
    """The entry of the key `path` in the last column of the reference page."""
    entries = sorted((limit for limit in LIMITS if limit.covers(path)), key=lambda limit: limit.level)
    if not entries:
        return "honoured"
    verb = {"warning": "no effect", "error": "error"}
    return "; ".join(
        f"{verb[limit.level]} {limit.when}" + (f": {limit.reason}" if limit.explains else "")
        for limit in entries
    )
