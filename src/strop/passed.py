"""Functions that a Python program passes, by the names that stand for them in the configuration."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
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

    Those of ``functools`` that cloudpickle sends by the name of their module, or not at all, are sent, too.
    """
    import cloudpickle  # most commands need none

    own = {"__main__", *cloudpickle.list_registry_pickle_by_value()}

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, functools.cached_property):  # in Python 3.11 it has a lock
                return functools.cached_property, (obj.func,), {"attrname": obj.attrname}
            if isinstance(obj, type(functools.cache(len))) and obj.__module__ in own:
                return functools.lru_cache(**obj.cache_parameters()), (obj.__wrapped__,)
            return super().reducer_override(obj)

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()
