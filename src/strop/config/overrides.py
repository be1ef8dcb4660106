"""Overrides in Hydra's grammar, and the user's YAML file with its config groups."""

from __future__ import annotations

import re
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from strop.config.keys import all_keys, nearest_key
from strop.config.paths import expand, similar_path
from strop.config.schema import RootConfig
from strop.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


def split_overrides(
    overrides: Sequence[str], folder: Path | None
) -> tuple[list[str], list[Override], list[str]]:
    """Parse `overrides` into config-group choices, settings, and a line for each that cannot be read.

    A group is a subfolder of `folder`, beside the user's file; its choice stays text, for Hydra.
    """
    groups: list[str] = []
    settings: list[Override] = []
    problems: list[str] = []
    for text in overrides:
        try:
            override = _parse(text)
        except ValueError as error:
            problems.append(f"{text}: {error}")
            continue
        key = override.key_or_group
        is_group = folder is not None and (folder / key).is_dir() and not isinstance(override.value(), dict)
        if is_group or key == "hydra.searchpath":
            groups.append(text)
        elif re.match(r"hydra\b", key):
            why = "Hydra's own settings have no effect; trainer.default_local_dir is the run folder"
            problems.append(f"{text}: {why}")
        else:
            settings.append(override)
    return groups, settings, problems


def apply_override(tree: DictConfig, override: Override, schema: type[RootConfig]) -> str | None:
    """Apply one setting to `tree`, in place; return a line if that is not possible.

    `key=value`, `+key=value` and `++key=value` all set the key; the schema later reports unknown ones.
    `~key` removes a key, `~key=value` only if it has that value.
    """
    key, value = override.key_or_group, override.value()
    known = all_keys(schema).get(key)
    if (
        known
        and not override.is_delete()
        and known.expected in ("string", "string or null")
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    ):
        value = str(override.input_line).partition("=")[2].strip()  # 1.10 is another name than 1.1
    try:
        if not override.is_delete():
            OmegaConf.update(tree, key, value, merge=True, force_add=True)
            return None
        section, _, name = key.rpartition(".")
        parent = OmegaConf.select(tree, section) if section else tree
        if not isinstance(parent, DictConfig) or name not in parent:
            guess = nearest_key(key, schema)
            hint = f"; did you mean ~{guess}?" if guess and guess != key else ""
            return f"{override.input_line}: no value to remove{hint}"
        if value is not None and value != parent[name]:
            return f"{override.input_line}: not removed, its value is {parent[name]}"
        del parent[name]
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        return f"{override.input_line}: cannot be set ({' '.join(str(error).split())})"
    return None


def _parse(text: str) -> Override:
    """Return one override; ``ValueError`` has a message of one line."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    try:
        override = parser.parse_override(text)
    except HydraException as error:
        try:
            override = parser.parse_override(_quote_home(text))
        except HydraException:
            raise ValueError(
                "cannot be read; expected key=value, +key=value or ~key, with quotes around a value that has "
                f"special characters: 'key=\"a=b c\"' ({' '.join(str(error).split())})"
            ) from None
    if not override.key_or_group:
        raise ValueError("expected key=value")
    if override.is_sweep_override():
        raise ValueError("several values for one key (a sweep) cannot be run; a list is written key=[a,b]")
    return override


def _quote_home(text: str) -> str:
    """Return `text` with quotes around paths that begin with `~`, which Hydra's grammar does not allow."""
    key, equals, value = text.partition("=")
    return key + equals + re.sub(r"(?<![^\[,:\s])~[^,\[\]{}'\"\s]*", lambda path: f"'{path.group()}'", value)


def shipped_names(default_name: str) -> tuple[str, ...]:
    """Return the values of `--config-name` that need no file of the user's."""
    return (default_name, "ppo_megatron_trainer") if default_name == "ppo_trainer" else (default_name,)


def locate(config_path: str | Path | None, config_name: str | None, default_name: str) -> Path | None:
    """Return the user's file, or None for the shipped defaults alone, which are called `default_name`.

    Raises:
        ConfigError: there is no such file.
    """
    name = (config_name or default_name).removesuffix(".yaml")
    if config_path is None:
        if name == default_name:
            return None
        names = shipped_names(default_name)
        if name in names:
            return Path(__file__).with_name(f"{name}.yaml")
        raise ConfigError(
            f"--config-name {config_name}: strop ships only {' and '.join(names)} for this command; "
            "for your own file, give its folder with --config-path"
        )
    path = Path(expand(config_path)).resolve()
    if path.is_file() and config_name is None:
        return path
    if not path.is_dir():
        raise ConfigError(f"--config-path {config_path}: no such file or folder{similar_path(config_path)}")
    file = next((file for file in (path / f"{name}.yaml", path / name) if file.is_file()), None)
    if file is None:
        found = ", ".join(sorted(other.name for other in path.glob("*.y*ml"))) or "no YAML file"
        raise ConfigError(f"--config-name {name}: no file {name}.yaml in {path}; it has {found}")
    return file


def compose_file(file: Path, group_overrides: Sequence[str], default_name: str) -> DictConfig:
    """Compose `file` and the config groups that it or `group_overrides` choose, without shipped defaults.

    Raises:
        ConfigError: the file is not YAML, holds no mapping, or does not compose.
    """
    from hydra import compose, initialize_config_dir  # not needed without a file
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException

    try:
        with (
            _own_hydra(file.parent, default_name),
            initialize_config_dir(str(file.parent), version_base="1.3"),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", message=".*missing `_self_`")  # it then comes last, as expected
            root = yaml.compose(file.read_bytes())
            if isinstance(root, yaml.ScalarNode) and root.value:  # Hydra takes a text for a key
                raise ValueError(
                    f"expected keys and values, as in `data:`, found the text {root.value!r:.60}"
                )
            if file.suffix != ".yaml":  # Hydra opens no other file, and looks for `run.yml.yaml`
                if isinstance(root, yaml.SequenceNode):
                    raise ValueError("expected keys and values, found a list")
                ConfigStore.instance().store(name=file.name, node=OmegaConf.load(file))
            layer = compose(file.name, overrides=list(group_overrides))
    except RecursionError as error:
        raise ConfigError(f"{file}: its `defaults:` list leads back to itself") from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError) as error:
        raise ConfigError(f"{file}: {' '.join(str(error).split())}") from error
    OmegaConf.set_struct(layer, False)
    return layer


@contextmanager
def _own_hydra(folder: Path, default_name: str) -> Generator[None, None, None]:
    """Own Hydra's global state for one composition, then restore it: the caller may be a Hydra application.

    The shipped defaults are always underneath. A `defaults:` list that names them therefore gets an
    empty layer, so the composition is exactly what the user wrote. A file of that name in `folder` is the
    user's own.
    """
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra

    outer, store = GlobalHydra.instance().hydra, ConfigStore.instance()
    stored = dict(store.repo)
    GlobalHydra.instance().clear()
    if not (folder / f"{default_name}.yaml").is_file():
        store.store(name=default_name, node={})
    try:
        yield
    finally:
        store.repo = stored
        GlobalHydra.instance().clear()
        if outer is not None:
            GlobalHydra.instance().initialize(outer)
