"""From a tree of layers and interpolations to plain values."""

from __future__ import annotations

from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException


def written_paths(mapping: dict[Any, Any], prefix: str = "") -> set[str]:
    """The full path of every key in a plain nested mapping."""
    paths: set[str] = set()
    for key, value in mapping.items():
        paths.add(f"{prefix}{key}")
        if isinstance(value, dict):
            paths |= written_paths(value, f"{prefix}{key}.")
    return paths


def resolve(node: DictConfig, problems: dict[str, str], prefix: str = "") -> dict[Any, Any]:
    """`node` as plain dicts and lists; an interpolation that leads nowhere is a line in `problems`."""
    plain = {}
    for key in list(node.keys()):
        path = f"{prefix}{key}"
        if OmegaConf.is_missing(node, key):
            problems[path] = f"{path}: no value given (??? marks a key that has to be set)"
            continue
        try:
            value = node[key]
            if isinstance(value, ListConfig):
                value = OmegaConf.to_container(value, resolve=True)
        except (OmegaConfBaseException, RecursionError) as error:
            problems[path] = f"{path}: {str(error).splitlines()[0]}"
            continue
        plain[key] = resolve(value, problems, f"{path}.") if isinstance(value, DictConfig) else value
    return plain


def put_default(tree: DictConfig, defaults: DictConfig, path: str) -> bool:
    """Replace the key `path` of `tree` by what `defaults` has there, or remove it; whether it changed."""
    section, _, word = path.rpartition(".")
    try:
        parent = OmegaConf.select(tree, section) if section else tree
    except OmegaConfBaseException:  # a name that is none of a key
        return False
    if not isinstance(parent, DictConfig):
        return False
    default: Any = OmegaConf.to_container(defaults, resolve=False)
    for name in path.split("."):
        default = default.get(name, _NOTHING) if isinstance(default, dict) else _NOTHING
    before = _raw(parent)
    for key in [key for key in parent if str(key) == word]:
        del parent[key]
    if default is not _NOTHING:
        parent[word] = default
    return _raw(parent) != before


_NOTHING = object()


def _raw(node: DictConfig) -> dict[Any, Any]:
    return cast(dict[Any, Any], OmegaConf.to_container(node, resolve=False))
