"""From YAML, overrides or a mapping to a `Config`, or to one error with everything that is wrong in them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException
from pydantic import ValidationError

from strop.config.keys import OF_ALL_NUMBERS, all_keys, unknown_key
from strop.config.memory.choices import with_choices
from strop.config.overrides import apply_override, compose_file, locate, shipped_names, split_overrides
from strop.config.recipes import read_recipe
from strop.config.schema import Config, RootConfig
from strop.config.trees import PPO, Root, Tree
from strop.config.verl import OWN_FOLDERS, Translation, leaves, translate, without_foreign
from strop.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


def load_config(
    overrides: Sequence[str] = (),
    *,
    config_name: str | None = None,
    config_path: str | Path | None = None,
    values: Sequence[Mapping[str, Any]] = (),
) -> Config:
    """Return the configuration of reinforcement learning; see `load_tree`."""
    return load_tree(PPO, overrides, config_name=config_name, config_path=config_path, values=values)


def load_tree(
    tree: Tree[Root],
    overrides: Sequence[str] = (),
    *,
    config_name: str | None = None,
    config_path: str | Path | None = None,
    recipe: str | Path | None = None,
    defaults: Mapping[str, Any] | None = None,
    values: Sequence[Mapping[str, Any]] = (),
) -> Root:
    """Return the defaults with the user's YAML file laid over them, and values and overrides over both.

    Args:
        tree: the kind of run.
        overrides: `key=value`, `+key=value`, `++key=value`, `~key`, or `group=choice` for a config group in
            the user's folder.
        config_name: the user's file, with or without ".yaml".
        config_path: its folder (relative to the current one), or the file itself. The file needs only the
            keys that differ, and no `defaults:` list.
        recipe: name of a shipped recipe, or the path of the user's, which lies below the file.
        defaults: a command's own defaults, between recipe and file.
        values: keys over the file, as {"trainer.save_freq": 5} or {"trainer": {"save_freq": 5}}; each mapping
            over the one before.

    Raises:
        ConfigError: the file cannot be read, or one line for each unknown key, wrong value, dead
            interpolation and unreadable override.
    """
    notes = []
    if config_path in OWN_FOLDERS and not Path(config_path).exists():
        name = (config_name or tree.name).removesuffix(".yaml")
        if name in shipped_names(tree.name):
            notes.append(f"--config-path {config_path}: no such folder; verl's has the place of the defaults")
            config_path = None
    file = locate(config_path, config_name, tree.name)
    groups, settings, problems = split_overrides(overrides, file.parent if file else None)
    layer = compose_file(file, groups, tree.name) if file else OmegaConf.create({})
    OmegaConf.set_struct(layer, False)
    below = read_recipe(recipe, tree.name) if recipe is not None else OmegaConf.create({})
    layer = cast(DictConfig, OmegaConf.merge(below, _layer(defaults or {}), layer, *map(_layer, values)))
    return _build(tree, layer, settings, problems, notes)


def _layer(values: Mapping[str, Any]) -> DictConfig:
    """Return keys, which may have dots, and nested mappings as one tree."""
    layer = OmegaConf.create({})
    for key, value in values.items():
        try:
            OmegaConf.update(layer, key, value, merge=True)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{key}={value!r:.80}: {str(error).splitlines()[0]}") from error
    return layer


def as_config(config: Config | DictConfig | Mapping[str, Any]) -> Config:
    """Return `config` as a `Config`; a mapping needs only the keys that differ from the defaults.

    Raises:
        ConfigError: as `load_config`.
    """
    if isinstance(config, Config):
        return config
    try:
        layer = OmegaConf.create(config) if isinstance(config, DictConfig) else OmegaConf.create(dict(config))
    except OmegaConfBaseException as error:
        raise ConfigError(f"configuration: {str(error).splitlines()[0]}") from error
    OmegaConf.set_struct(layer, False)
    return _build(PPO, layer, [], [], [])


def to_yaml(config: RootConfig) -> str:
    """Return `config` as YAML, which `load_tree(..., config_path=file)` reads back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=10_000)


def _build(
    tree: Tree[Root], layer: DictConfig, settings: list[Override], problems: list[str], notes: list[str]
) -> Root:
    """Lay `layer` and `settings` over the defaults, resolve, validate.

    `problems` and `notes` are those known already.
    """
    given = cast(dict[Any, Any], OmegaConf.to_container(layer, resolve=False))
    problems, names = list(problems), Translation()
    if tree is PPO:
        names = _of_verl(given, settings)
        given = without_foreign(given)
        layer = OmegaConf.create(given)
        settings = [own for setting in settings if (own := _own_part(setting))]
        problems += names.problems
    in_file = written_paths(given)
    defaults = cast(DictConfig, OmegaConf.merge(tree.defaults()))  # a copy
    OmegaConf.set_readonly(defaults, False)
    for path in _of_another_kind(OmegaConf.to_container(defaults, resolve=False), given):
        section, _, name = path.rpartition(".")
        # OmegaConf cannot merge the two.
        del (OmegaConf.select(defaults, section) if section else defaults)[name]
    merged = cast(DictConfig, OmegaConf.merge(defaults, layer))
    OmegaConf.set_readonly(merged, False)
    overridden: set[str] = set()
    for override in settings:
        if problem := apply_override(merged, override, tree.schema):
            problems.append(problem)
        overridden |= written_paths({override.key_or_group: override.value()})
    for path, value in {**{path: tree.raw_default(path) for path in names.defaults}, **names.values}.items():
        OmegaConf.update(merged, path, value, force_add=True)
    overridden |= {path[:end] for path in names.values for end, mark in enumerate(f"{path}.") if mark == "."}
    written = (in_file | overridden) - set(names.defaults)
    tree.settle(merged, written)

    by_path: dict[str, str | None] = {}
    plain = resolve(merged, by_path)
    config = None
    try:
        config = tree.schema.model_validate(plain)
    except ValidationError as error:
        lines = _readable(error, plain, tree.schema)
        # A key that follows another one repeats its mistake.
        own = {path: line for path, line in lines.items() if path in written or not tree.followed_by(path)}
        by_path = {**(own or lines), **by_path}
    if problems or by_path or config is None:
        for path, source in names.sources.items():
            if source != path and by_path.get(path):
                by_path[path] = f"{by_path[path]} (written as {source})"
        raise ConfigError(*problems, *(line for line in by_path.values() if line is not None))
    keys = all_keys(tree.schema)
    changed = {path for path in in_file if path in keys and _differs(merged, tree, path)}
    config.note_written(written, meant=overridden | changed, notes=[*notes, *names.notes])
    return with_choices(config)


def _of_verl(given: dict[Any, Any], settings: list[Override]) -> Translation:
    """Return what keys and values of verl mean here, those of `settings` over those of the file."""
    values, overridden = dict(leaves(given)), set[str]()
    for setting in settings:
        if not setting.is_delete():
            own = dict(leaves({setting.key_or_group: setting.value()}))
            values |= own
            overridden |= own.keys()
    return translate(values, overridden, PPO.raw_default)


def _own_part(setting: Override) -> Override | None:
    """Return `setting` without verl's keys; None if nothing is left."""
    key, value = setting.key_or_group, setting.value()
    own = without_foreign({key: value})
    if not own:
        return None
    return setting if own == {key: value} else replace(setting, _value=own[key])


def _of_another_kind(default: Any, given: Any, path: str = "") -> Iterator[str]:
    """Yield the paths at which one is a list and the other a mapping."""
    if {type(default), type(given)} == {dict, list}:
        yield path
    elif isinstance(default, dict) and isinstance(given, dict):
        for key in default.keys() & given.keys():
            yield from _of_another_kind(default[key], given[key], f"{path}.{key}" if path else key)


def written_paths(mapping: dict[Any, Any], prefix: str = "") -> set[str]:
    """Return the full path of every key in a plain nested mapping."""
    paths: set[str] = set()
    for key, value in mapping.items():
        paths.add(f"{prefix}{key}")
        if isinstance(value, dict):
            paths |= written_paths(value, f"{prefix}{key}.")
    return paths


def resolve(node: DictConfig, problems: dict[str, str | None], prefix: str = "") -> dict[Any, Any]:
    """Return `node` as plain dicts and lists; an interpolation that cannot be resolved is a problem.

    A reference to a key without a value is a problem without a line: that key has its own.
    """
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
        except InterpolationToMissingValueError:
            problems[path] = None
            continue
        except (OmegaConfBaseException, RecursionError) as error:
            problems[path] = f"{path}: {str(error).splitlines()[0]}"
            continue
        plain[key] = resolve(value, problems, f"{path}.") if isinstance(value, DictConfig) else value
    return plain


def _differs(merged: DictConfig, tree: Tree[Any], path: str) -> bool:
    """Return True if a key has another value than its default, beside the other values of `merged`."""
    followed = tree.followed_by(path)
    default = OmegaConf.select(merged, followed) if followed else tree.raw_default(path)
    value = OmegaConf.select(merged, path)
    return (OmegaConf.to_container(value) if OmegaConf.is_config(value) else value) != default


def _readable(error: ValidationError, plain: dict[Any, Any], schema: type[RootConfig]) -> dict[str, str]:
    """Return a line for each key that pydantic reports; several about one key (union members) become one."""
    keys = all_keys(schema)
    lines: dict[str, str] = {}
    for item in error.errors(include_url=False):
        words = [str(word) for word in item["loc"]]
        path = ".".join(words)
        if item["type"] in ("extra_forbidden", "invalid_key"):
            lines.setdefault(path, unknown_key(path, schema))
            continue
        while path not in keys:  # below a key: an element of a list, or a member of a union
            words.pop()
            path = ".".join(words)
        found = "nothing" if item["type"] == "missing" else _shown(plain, words)
        lines.setdefault(path, f"{path}: found {found}, expected {keys[path].expected}{_bound(item)}")
    return lines


def _bound(item: Any) -> str:
    """Return the bound that a value of the right type exceeds, if the type in words does not have it."""
    if item["type"] == "text":
        return f" {item['msg']}"
    if item["type"] == "string_too_short":
        return " (not empty)"
    words = {"less_than_equal": "at most", "greater_than_equal": "at least"}.get(item["type"])
    bound = next(iter(item.get("ctx", {}).values()), None)
    return f" ({words} {bound})" if words and bound in OF_ALL_NUMBERS else ""


def _shown(plain: dict[Any, Any], words: list[str]) -> str:
    value = functools.reduce(operator.getitem, words, plain)
    text = "null" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
