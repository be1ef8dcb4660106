"""A user's reward function: ``compute_score(data_source, solution_str, ground_truth, extra_info=None)``.

It returns a number, or a dict with a number under "score" and further named numbers, which are recorded as
parts. The four arguments are passed as keywords; a function that needs only some takes ``**kwargs``.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

from strop.config.paths import expand
from strop.errors import ConfigError
from strop.rewards.worker.records import KEYWORDS

KEY = "custom_reward_function"


class CustomReward:
    """A function from a Python file; it is pickled as path and name, and reloaded from there."""

    def __init__(self, path: str, name: str) -> None:
        self.path = str(Path(expand(path)).absolute())
        self.name = name
        self.function = _find_function(_load_module(self.path), self.path, name)
        require_score_signature(self.function, f"{KEY}.name={name!r} in {self.path}")

    def __call__(self, *arguments: Any, **sample: Any) -> Any:
        return self.function(*arguments, **sample)

    def __reduce__(self) -> tuple[type[CustomReward], tuple[str, str]]:
        return CustomReward, (self.path, self.name)

    def __repr__(self) -> str:
        return f"{self.path}:{self.name}"


def load_custom_reward(path: str | None, name: str = "compute_score") -> CustomReward | None:
    """Load the function ``name`` from the Python file ``path``; return None if ``path`` is null.

    Raises:
        ConfigError: no such file, an error while it is imported, no such function in it, or one that cannot
            be called as reward functions are.
    """
    return None if path is None else CustomReward(path, name)


def require_score_signature(function: Any, where: str, **options: Any) -> None:
    """Raise ``ConfigError`` unless ``function`` accepts a reward function's keywords and ``options``."""
    keywords = dict.fromkeys(KEYWORDS) | options
    wanted = ", ".join(keywords)
    if not callable(function):
        raise ConfigError(f"{where} is {function!r:.80}: expected a function compute_score({wanted})")
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{where} is async: expected a plain function compute_score({wanted})")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C, without a signature
        return
    try:
        signature.bind(**keywords)
    except TypeError as error:
        raise ConfigError(
            f"{where} has the parameters {signature} ({error}); expected the keywords {wanted}: add the "
            "missing ones, or **kwargs"
        ) from None


def _load_module(path: str) -> ModuleType:
    if not Path(path).is_file():
        raise ConfigError(f"{KEY}.path={path!r}: no such file")
    name = f"strop_custom_reward_{zlib.crc32(path.encode()):08x}"  # the same name for a file on every machine
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{KEY}.path={path!r}: expected a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
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
        hint = "; is its folder on PYTHONPATH?" if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigError(
            f"{KEY}.path={path!r} cannot be imported{place}: {type(error).__name__}: {error}{hint}"
        ) from error
    return module


def _find_function(module: ModuleType, path: str, name: str) -> Any:
    found = vars(module).get(name)
    if found is not None:
        return found
    own = [
        known
        for known, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not known.startswith("_")
    ]
    raise ConfigError(
        f"{KEY}.name={name!r}: {path} has no such function (it has: {', '.join(own) or 'no functions'})"
    )
