"""From YAML, overrides or a mapping to a `Config`, or to one error with everything that is wrong in them."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException
from pydantic import ValidationError

from strop.config import placement
from strop.config.derived import STEPS, Values, copied, written_paths
from strop.config.identity import value_in
from strop.config.keys import OF_ALL_NUMBERS, all_keys, unknown_key
from strop.config.memory.choices import choices, with_values
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
        defaults: keys derived from the data, such as the rows of an iteration, between recipe and file.
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
    layers = [(f"recipe {recipe}", _plain(read_recipe(recipe, tree.name)))] if recipe is not None else []
    layers.append(("derived: from data, length and model", _nested(defaults or {})))
    if file:
        layers.append((f"file {file}", _plain(compose_file(file, groups, tree.name))))
    layers += [("argument", _nested(keys)) for keys in values]
    return _build(tree, layers, settings, problems, notes)


def _nested(values: Mapping[str, Any]) -> dict[Any, Any]:
    """Return keys, which may have dots, and nested mappings as one nested mapping."""
    layer = OmegaConf.create({})
    for key, value in values.items():
        try:
            OmegaConf.update(layer, key, value, merge=True)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{key}={value!r:.80}: {str(error).splitlines()[0]}") from error
    return _plain(layer)


def _plain(layer: DictConfig) -> dict[Any, Any]:
    return cast(dict[Any, Any], OmegaConf.to_container(layer, resolve=False))


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
    return _build(PPO, [("argument", _plain(layer))], [], [], [])


def to_yaml(config: RootConfig) -> str:
    """Return `config` as YAML, which `load_tree(..., config_path=file)` reads back to an equal one."""
    values = config.model_dump(mode="json")
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes a text such as 1e-5 too: a number to OmegaConf, unlike to YAML 1.1."""


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d[\d_]*(\.[\d_]*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _build(
    tree: Tree[Root],
    layers: list[tuple[str, dict[Any, Any]]],
    settings: list[Override],
    problems: list[str],
    notes: list[str],
) -> Root:
    """Lay ``layers``, each with its author, and ``settings`` over the defaults, derive, resolve, validate.

    ``problems`` and ``notes`` are those known already.
    """
    values, names = Values(tree.defaults()), Translation()
    if tree is PPO:
        given = Values(OmegaConf.create({}))
        for author, keys in layers:
            given = given.under(keys, author)
        names = _of_verl(_plain(given.tree), settings)
        layers = [(author, without_foreign(keys)) for author, keys in layers]
        settings = [own for setting in settings if (own := _own_part(setting))]
    for author, keys in layers:
        values = values.under(keys, author) if keys else values
    in_file = values.written
    values, unusable = _overridden(values, settings, tree.schema)
    values = _translated(values, names, tree)
    for step in STEPS:
        values = step(values, tree)

    by_path: dict[str, str | None] = {}
    plain = resolve(values.tree, by_path)
    config = None
    try:
        config = tree.schema.model_validate(plain)
    except ValidationError as error:
        lines = _readable(error, plain, tree.schema)
        # A key that follows another one repeats its mistake.
        own = {
            path: line for path, line in lines.items() if path in values.written or not tree.followed_by(path)
        }
        by_path = {**(own or lines), **by_path}
    problems = [*problems, *names.problems, *unusable]
    if problems or by_path or config is None:
        for path, source in names.sources.items():
            if source != path and by_path.get(path):
                by_path[path] = f"{by_path[path]} (written as {source})"
        raise ConfigError(*problems, *(line for line in by_path.values() if line is not None))
    keys = all_keys(tree.schema)
    meant = {path for path in in_file if path in keys and _differs(values.tree, tree, path)}
    meant |= _paths_of(settings) | _with_sections(names.values)
    config.note_written(values.written, meant=meant, notes=[*notes, *names.notes])
    config.note_gpus(placement.visible_gpus())
    chosen, whys = choices(config)
    config = with_values(config, chosen)
    config.note_authors({**values.authors, **{key: f"derived: {why}" for key, why in whys.items()}})
    return config


def _overridden(
    values: Values, settings: list[Override], schema: type[RootConfig]
) -> tuple[Values, list[str]]:
    """Return ``values`` with overrides applied, and a line for each that cannot be."""
    if not settings:
        return values, []
    tree, paths = copied(values.tree), _paths_of(settings)
    problems = [line for setting in settings if (line := apply_override(tree, setting, schema))]
    authors = {**values.authors, **dict.fromkeys(paths, "override")}
    return Values(tree, authors, values.written | paths), problems


def _paths_of(settings: list[Override]) -> set[str]:
    return {path for one in settings for path in written_paths({one.key_or_group: one.value()})}


def _translated(values: Values, names: Translation, tree: Tree[Any]) -> Values:
    """Return ``values`` with those of verl's keys under their names here."""
    defaults = {path: tree.raw_default(path) for path in names.defaults}
    sources = {path: f"verl: {names.sources[path]}" for path in names.values}
    values = values.changed({**defaults, **names.values}, sources)
    authors = {path: author for path, author in values.authors.items() if path not in defaults}
    return replace(
        values, authors=authors, written=(values.written | _with_sections(names.values)) - defaults.keys()
    )


def _with_sections(paths: Iterable[str]) -> set[str]:
    """Return paths, and those of all sections that hold them."""
    return {path[:end] for path in paths for end, mark in enumerate(f"{path}.") if mark == "."}


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


def resolve(
    node: DictConfig, problems: dict[str, str | None], prefix: str = "", written: Any = None
) -> dict[Any, Any]:
    """Return `node` as plain dicts and lists; an interpolation that cannot be resolved is a problem.

    A reference to a key without a value is a problem without a line: that key has its own. ``written`` has
    the values of the whole tree, by default those of ``node``.
    """
    written = OmegaConf.to_container(node, resolve=False) if written is None else written
    plain = {}
    for key in list(node.keys()):
        path = f"{prefix}{key}"
        if OmegaConf.is_missing(node, key):
            problems[path] = f"{path}: no value given (??? marks a key that has to be set)"
            continue
        if (value := _referenced(written, path)) is not None:
            plain[key] = value
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
        plain[key] = resolve(value, problems, f"{path}.", written) if isinstance(value, DictConfig) else value
    return plain


_REFERENCE = re.compile(r"\$\{([a-z_]\w*(?:\.\w+)*)\}")


def _referenced(written: Any, path: str) -> float | str | None:
    """Return the number or text that a plain reference to a key leads to; None for all that is not so simple.

    OmegaConf parses each interpolation that it meets, which is a quarter of the time of loading.
    """
    value = value_in(written, path)
    if not isinstance(value, str) or not _REFERENCE.fullmatch(value):
        return None
    for _ in range(8):
        if not isinstance(value, str):
            return value if isinstance(value, int | float) else None
        if (reference := _REFERENCE.fullmatch(value)) is None:
            return None if "${" in value or value == "???" else value
        value = value_in(written, reference[1])
    return None


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
