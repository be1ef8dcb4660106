"""A user's reward function: ``compute_score`` of a Python file.

It takes the values that it names (:mod:`strop.rewards.arguments`) and returns a number, or a dict with a
number under "score" and further named numbers, which are recorded as parts; a function for a batch returns a
list of these. Modules beside the file can be imported, also in scoring processes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import site
import sys
import sysconfig
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from strop.algorithms.registry import resolve
from strop.config.paths import expand, similar_path
from strop.errors import ConfigError, nearest
from strop.passed import is_function
from strop.rewards.arguments import Function

KEY = "custom_reward_function"
_DEFAULT = "compute_score"


class CustomReward:
    """A function from a Python file; it is pickled as path and name, and reloaded from there.

    A file may change the folder of its own process, and not that of the run, whose paths are relative.
    """

    def __init__(self, path: str, name: str, is_own_process: bool = False) -> None:
        self.path = str(Path(expand(path)).absolute())
        with contextlib.nullcontext() if is_own_process else contextlib.chdir("."):
            module = load_module(self.path, f"{KEY}.path")
        self.name, self.function = _find_function(module, self.path, name)
        self.where = f"{KEY}.name={self.name} in {self.path}"
        self.__wrapped__ = self.function  # its signature is that of this object
        self._binding = Function(self.function, self.where)

    def __call__(self, /, *arguments: Any, **values: Any) -> Any:
        """Call the function, with those of the ``values`` that it takes."""
        return self.function(*arguments, **(values if arguments else self._binding.arguments(values)))

    def __reduce__(self) -> tuple[type[CustomReward], tuple[str, str, bool]]:
        return CustomReward, (self.path, self.name, True)

    def __repr__(self) -> str:
        return f"{self.path}:{self.name}"


def load_custom_reward(path: str | None, name: str = _DEFAULT) -> Callable[..., Any] | None:
    """Load the function ``name`` from the Python file ``path``; return None if ``path`` is null.

    ``path`` may also stand for a function that a program passes.

    Raises:
        ConfigError: no such file, an error while it is imported, no such function in it, or one that cannot
            be called as reward functions are.
    """
    if path is None:
        return None
    return resolve(path, {}, f"{KEY}.path") if is_function(path) else CustomReward(path, name)


def load_module(path: str, key: str) -> ModuleType:
    """Import a user's Python file, whose name the configuration has under ``key``; raises ``ConfigError``."""
    if not Path(path).is_file():
        raise ConfigError(f"{key}={path!r}: no such file{similar_path(path)}")
    name = f"strop_custom_reward_{zlib.crc32(path.encode()):08x}"  # the same name for a file on every machine
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{key}={path!r}: expected a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    _add_siblings(Path(path).parent)
    sys.modules[name] = module  # dataclasses and pickle look it up
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    # User code may raise anything on import, SystemExit included.
    except BaseException as error:
        del sys.modules[name]
        lines = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path
        ]
        place = f" (line {lines[-1]})" if lines else ""
        hint = ""
        if isinstance(error, ModuleNotFoundError):
            hint = "; modules beside the file are found; is the folder of this one on PYTHONPATH?"
        elif isinstance(error, ImportError) and "relative import" in str(error):
            hint = "; the file is no part of a package: write `import helper`, without the dot"
        raise ConfigError(
            f"{key}={path!r} cannot be imported{place}: {type(error).__name__}: {error}{hint}"
        ) from error
    return module


_folders: list[Path] = []
"""Folders of reward files, the latest last."""


def _add_siblings(folder: Path) -> None:
    """Let modules in ``folder`` be imported: behind the standard library, before installed packages.

    A module of the same name beside another reward file, imported earlier, is forgotten.
    """
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        of_other = origin is not None and "." not in name and _home(Path(origin)) in _folders
        if of_other and _home(Path(str(origin))) != folder and _has_module(folder, name):
            for known in [known for known in sys.modules if known == name or known.startswith(f"{name}.")]:
                del sys.modules[known]
    sys.path[:] = search_path(folder)
    if folder not in _folders:
        _folders.append(folder)
    importlib.invalidate_caches()


def search_path(folder: Path) -> list[str]:
    """Return ``sys.path`` as it is for a reward file in ``folder``."""
    place = str(folder)
    if place in sys.path and folder not in _folders:
        return list(sys.path)
    paths = [path for path in sys.path if path != place]
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
    first = next((i for i, known in enumerate(paths) if known in installed), len(paths))
    while first and Path(paths[first - 1]) in _folders:
        first -= 1
    return [*paths[:first], place, *paths[first:]]


def _home(origin: Path) -> Path:
    """Return the folder from which a top-level module or package with this file was imported."""
    return origin.parent.parent if origin.name == "__init__.py" else origin.parent


def _has_module(folder: Path, name: str) -> bool:
    return (folder / f"{name}.py").is_file() or (folder / name).is_dir()


def _find_function(module: ModuleType, path: str, name: str) -> tuple[str, Any]:
    """Return name and function; in the place of a missing ``compute_score`` the only public function.

    That of ``functools.cache`` is one. In a file without functions another object that can be called counts;
    one that is imported does not.
    """
    found = vars(module).get(name)
    if found is not None:
        return name, found
    objects = {
        known: value
        for known, value in vars(module).items()
        if callable(value) and not inspect.isclass(value) and not known.startswith("_")
        if getattr(value, "__module__", None) == module.__name__
    }
    own = [known for known in objects if inspect.isfunction(inspect.unwrap(objects[known]))] or [*objects]
    if name == _DEFAULT and len(own) == 1:
        return own[0], objects[own[0]]
    write = f"; write {KEY}.name={nearest(name, own) or own[0]}" if own else ""
    raise ConfigError(
        f"{KEY}.path={path}: no function {name}; it has {', '.join(own) or 'no functions'}{write}"
    )
