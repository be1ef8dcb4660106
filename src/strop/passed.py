"""Functions that a Python program passes, by the names that stand for them in the configuration."""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import Any

from strop.errors import ConfigError

PASSED: dict[str, Callable[..., Any]] = {}
"""``function:<name>-<digest>`` -> the function, in this process; workers on Ray get copies."""


def is_function(name: str) -> bool:
    """Return True if ``name`` stands for a function that a program passes."""
    return name.startswith("function:")


@contextmanager
def passing(functions: Mapping[str, Callable[..., Any]]) -> Generator[None]:
    """Let configurations name ``functions`` in the body."""
    added = functions.keys() - PASSED.keys()
    PASSED.update(functions)
    try:
        yield
    finally:
        for name in added:
            del PASSED[name]


def for_process(value: Any, named: str, remedy: str) -> bytes:
    """Return ``dumps``; ``ConfigError`` with the ``remedy`` for a user's ``value`` that cannot be pickled."""
    try:
        return dumps(value)
    # Pickling runs user code, which may raise anything.
    except Exception as error:
        raise ConfigError(
            f"{named} cannot be pickled for its process ({error}); keep open files, locks, clients and "
            f"models out of {remedy}"
        ) from error


def dumps(value: Any) -> bytes:
    """Pickle functions and classes of a script, a notebook or a user's file, as cloudpickle does.

    Those of ``functools`` that cloudpickle sends by the name of their module, or not at all, are sent, too;
    so are submodules that only functions within a function name (``_submodules``).
    """
    import cloudpickle  # most commands need none

    own = {"__main__", *cloudpickle.list_registry_pickle_by_value()}

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, functools.cached_property):  # in Python 3.11 it has a lock
                return functools.cached_property, (obj.func,), {"attrname": obj.attrname}
            if isinstance(obj, type(functools.cache(len))) and obj.__module__ in own:
                return functools.lru_cache(**obj.cache_parameters()), (obj.__wrapped__,)
            reduced: Any = super().reducer_override(obj)
            if isinstance(obj, FunctionType) and isinstance(reduced, tuple):  # by value
                reduced[2][1]["__globals__"] |= _submodules(obj)
            return reduced

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def _submodules(function: FunctionType) -> dict[str, ModuleType]:
    """Return by name the imported submodules, as ``urllib.request``, that code in ``function`` may read.

    cloudpickle looks for them in the function's own code, not in that of functions, lambdas and (before
    Python 3.12) comprehensions in it: these would find ``urllib`` without ``request`` in another process.
    """
    names, codes = set(), [function.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    globs = (function.__globals__.get(name) for name in names)
    packages = {module.__name__ for module in globs if isinstance(module, ModuleType)}
    return {
        name: module
        for name, module in list(sys.modules.items())
        for package in packages
        if name.startswith(f"{package}.") and names.issuperset(name.removeprefix(f"{package}.").split("."))
    }
