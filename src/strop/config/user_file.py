"""The user's own YAML file with its config groups, composed by Hydra: a layer over the defaults.

The layers are put together in `load` rather than by Hydra: so a file in the shape of the reference document
needs no `defaults:` list, and a key that does not exist is kept until the schema reports it.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from strop.errors import ConfigError


def locate(config_path: str | Path | None, config_name: str | None, default_name: str) -> Path | None:
    """The user's file; None when only the shipped defaults, called `default_name`, are meant.

    Raises:
        ConfigError: there is no such file.
    """
    name = (config_name or default_name).removesuffix(".yaml")
    if config_path is None:
        if name == default_name:
            return None
        raise ConfigError(
            f"--config-name {config_name}: strop ships only {default_name} for this command; "
            "for a file of your own, give its folder with --config-path"
        )
    path = Path(config_path).expanduser().resolve()
    if path.is_file() and config_name is None:
        return path
    if not path.is_dir():
        raise ConfigError(f"--config-path {config_path}: no such folder")
    file = path / f"{name}.yaml"
    if not file.is_file():
        found = ", ".join(sorted(other.name for other in path.glob("*.yaml"))) or "no YAML file"
        raise ConfigError(f"--config-name {name}: no file {name}.yaml in {path}; it has {found}")
    return file


def compose_file(file: Path, group_overrides: Sequence[str], default_name: str) -> DictConfig:
    """`file` and the config groups that it or `group_overrides` choose, without the shipped defaults.

    Raises:
        ConfigError: the file is not YAML, holds no mapping, or does not compose.
    """
    from hydra import compose, initialize_config_dir  # here: not needed without a file
    from hydra.errors import HydraException

    try:
        with (
            _own_hydra(file.parent, default_name),
            initialize_config_dir(str(file.parent), version_base="1.3"),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", message=".*missing `_self_`")  # it then comes last, as expected
            layer = compose(file.name, overrides=list(group_overrides))
    except RecursionError as error:
        raise ConfigError(f"{file}: its `defaults:` list leads back to itself") from error
    except (HydraException, OmegaConfBaseException, YAMLError, OSError, ValueError) as error:
        raise ConfigError(f"{file}: {' '.join(str(error).split())}") from error
    OmegaConf.set_struct(layer, False)
    return layer


@contextmanager
def _own_hydra(folder: Path, default_name: str) -> Generator[None, None, None]:
    """Hydra's global state for one composition, then put back: the caller may be a Hydra application.

    The shipped defaults lie beneath every file. To a `defaults:` list that names them they are therefore an
    empty layer, and what is composed is exactly what the user wrote. A file of that name in `folder` is the
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
