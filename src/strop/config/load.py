"""From YAML, overrides or a plain mapping to a `Config`, with everything that is wrong reported at once."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, cast

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from strop.config.keys import all_keys, nearest, unknown_key
from strop.config.overrides import apply_override, compose_file, locate, split_overrides
from strop.config.schema import Config, RootConfig
from strop.config.trees import PPO, Root, Tree
from strop.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


# From a tree of layers and interpolations to plain values.


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


@dataclass(frozen=True)
class Loaded(Generic[Root]):
    """What a file and overrides come to, with everything in them that cannot be used."""

    config: Root | None
    """With defaults in place of what is wrong; None where that is not possible."""
    problems: list[str]
    """One line for each unknown key, wrong value, dead interpolation and unreadable override."""
    wrong: frozenset[str]
    """The keys that the problems are about, and those that were perhaps meant: they stand at defaults."""

    def reliable(self, findings: Iterable[str]) -> list[str]:
        """Those `findings` about `config` that name none of the keys that are wrong."""
        names = [re.compile(rf"(?<![\w.]){re.escape(key)}(?!\w|\.\w)") for key in self.wrong]
        return [line for line in findings if not any(name.search(line) for name in names)]

    def get(self) -> Root:
        """The configuration, or all problems as one `ConfigError`."""
        if self.problems or self.config is None:
            raise ConfigError(*self.problems)
        return self.config


def load_config(
    overrides: Sequence[str] = (), *, config_name: str | None = None, config_path: str | Path | None = None
) -> Config:
    """The configuration of reinforcement learning; see `load_tree`."""
    return load_tree(PPO, overrides, config_name=config_name, config_path=config_path)


def load_tree(
    tree: Tree[Root],
    overrides: Sequence[str] = (),
    *,
    config_name: str | None = None,
    config_path: str | Path | None = None,
) -> Root:
    """The defaults, the user's YAML file over them, and Hydra overrides over both.

    Args:
        tree: the kind of run that is configured.
        overrides: `key=value`, `+key=value`, `++key=value`, `~key`, or `group=choice` for a config group in
            the user's folder.
        config_name: the user's file, with or without ".yaml".
        config_path: its folder (relative to the current one), or the file itself. The file needs only the
            keys that differ, and no `defaults:` list.

    Raises:
        ConfigError: one line for each unknown key, wrong value, dead interpolation and unreadable override.
    """
    return read_tree(tree, overrides, config_name=config_name, config_path=config_path).get()


def read_tree(
    tree: Tree[Root],
    overrides: Sequence[str] = (),
    *,
    config_name: str | None = None,
    config_path: str | Path | None = None,
) -> Loaded[Root]:
    """As `load_tree`, for who goes on to look for more mistakes.

    Raises:
        ConfigError: the file itself cannot be read.
    """
    file = locate(config_path, config_name, tree.name)
    groups, settings, problems = split_overrides(overrides, file.parent if file else None)
    layer = compose_file(file, groups, tree.name) if file else OmegaConf.create({})
    return _build(tree, layer, settings, problems)


def as_config(config: Config | DictConfig | Mapping[str, Any]) -> Config:
    """`config` as a `Config`: a mapping, which may hold only the keys that differ, is laid over the defaults.

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
    return _build(PPO, layer, [], {}).get()


def to_dict(config: RootConfig) -> dict[str, Any]:
    """`config` as plain nested dicts and lists."""
    return config.model_dump()


def to_yaml(config: RootConfig) -> str:
    """`config` as YAML, which `load_tree(..., config_path=file)` reads back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=10_000)


def _build(
    kind: Tree[Root], layer: DictConfig, settings: list[Override], unreadable: dict[str, str]
) -> Loaded[Root]:
    """Lay `layer` and `settings` over the defaults, resolve, validate.

    `unreadable` has problems that are known already, by the key that the override seems to be about.
    """
    written = written_paths(cast(dict[Any, Any], OmegaConf.to_container(layer, resolve=False)))
    tree = cast(DictConfig, OmegaConf.merge(kind.defaults(), layer))  # a copy
    OmegaConf.set_readonly(tree, False)
    problems, wrong = list(unreadable.values()), set(unreadable)
    overridden: set[str] = set()
    for override in settings:
        problem = apply_override(tree, override, kind.schema)
        if problem:
            problems.append(problem)
            wrong.add(override.key_or_group)
        overridden |= written_paths({override.key_or_group: override.value()})
    written |= overridden
    kind.settle(tree, written)

    by_path: dict[str, str] = {}
    config = _validated(kind, tree, by_path)
    wrong |= by_path.keys()
    if config is not None:
        config.note_written(written - wrong, overridden=overridden - wrong)
    meant = _perhaps_meant(wrong, kind.schema) - written
    return Loaded(config, [*problems, *by_path.values()], frozenset(wrong | meant))


def _validated(kind: Tree[Root], tree: DictConfig, by_path: dict[str, str]) -> Root | None:
    """`tree` by the schema; what does not fit is noted in `by_path`, and in `tree` put to its default."""
    while True:
        plain = resolve(tree, by_path)
        try:
            return kind.schema.model_validate(plain)
        except ValidationError as error:
            lines = _readable(error, plain, kind.schema)
        for path, line in lines:
            by_path.setdefault(path, line)
        replaced = [put_default(tree, kind.defaults(), path) for path, _ in lines]
        if not any(replaced):
            return None


def _perhaps_meant(wrong: Collection[str], schema: type[RootConfig]) -> set[str]:
    """The keys that are most like those of `wrong` that do not exist; of a section, all keys in it."""
    keys, meant = all_keys(schema), set()
    for path in wrong:
        guess = path if path in keys else nearest(path, schema)
        if guess is not None:
            meant |= {key for key in keys if key == guess or key.startswith(f"{guess}.")}
    return meant


def _readable(
    error: ValidationError, plain: dict[Any, Any], schema: type[RootConfig]
) -> list[tuple[str, str]]:
    """Path and line for each of pydantic's errors; several about one key (members of a union) become one."""
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
        lines.setdefault(path, f"{path}: found {found}, expected {keys[path].expected}")
    return list(lines.items())


def _shown(plain: dict[Any, Any], words: list[str]) -> str:
    value: Any = plain
    for word in words:
        value = value[word]
    text = "null" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
