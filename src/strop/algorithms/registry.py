"""Finding a function by its registered name or by its import path.

Estimators and policy losses are kept in plain dictionaries from name to function; what is not in them is
taken as the import path of a user's own function: ``package.module:function`` or ``package.module.function``.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from strop.errors import ConfigError


def resolve(name: str, known: Mapping[str, Callable[..., Any]], key: str) -> Callable[..., Any]:
    """The function called ``name`` in ``known``, or the one that ``name`` is the import path of.

    ``key`` is the configuration key that ``name`` came from, for the error text.

    Raises:
        ConfigError: an unknown name, a module that cannot be imported, or no such function in it.
    """
    if name in known:
        return known[name]
    module_name, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    if not module_name or not attribute:
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise ConfigError(
            f"{key}={name!r} is unknown{hint} (known: {', '.join(sorted(known))}; "
            "a function of your own is named by its import path, package.module:function)"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{key}={name!r}: the module {module_name!r} cannot be imported ({error}); "
            f"is its folder on PYTHONPATH? (built in: {', '.join(sorted(known))})"
        ) from error
    function = vars(module).get(attribute)
    if not callable(function):
        raise ConfigError(f"{key}={name!r}: the module {module_name!r} has no function {attribute!r}")
    return function


def required_parameters(function: Callable[..., Any]) -> frozenset[str]:
    """The names of the parameters that a caller must give: those without a default."""
    return frozenset(
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    )


def asked_for(function: Callable[..., Any], available: Mapping[str, Any]) -> dict[str, Any]:
    """The part of ``available`` that the function has parameters for; all of it if it takes ``**kwargs``."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(available)
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in available.items() if name in names}


def name_of(function: Callable[..., Any]) -> str:
    """A name for error texts."""
    return function.__name__ if inspect.isroutine(function) else repr(function)
