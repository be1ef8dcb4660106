"""Functions that configuration names, and calls whose arguments are bound by parameter name.

Estimators and policy losses are kept in plain dictionaries from name to function; any other name is the
import path of a user's function: ``package.module:function`` or ``package.module.function``. The names of a
function's parameters select what it gets, so that a new input changes no other function.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from strop.errors import ConfigError, did_you_mean
from strop.passed import PASSED, is_function

Function = Callable[..., Any]


def register(known: dict[str, Function], name: str, kind: str) -> Callable[[Function], Function]:
    """Return a decorator that adds a function of this kind to ``known``. A name is taken once."""

    def add(function: Function) -> Function:
        if name in known:
            raise ValueError(f"{kind} {name!r} is already registered")
        known[name] = function
        return function

    return add


def resolve(name: str, known: Mapping[str, Any], key: str) -> Function:
    """Return the function called ``name`` in ``known``, one of the program, or that at an import path.

    ``key`` is the configuration key of ``name``, for the error text.

    Raises:
        ConfigError: an unknown name, a module that cannot be imported, or no such function in it.
    """
    if name in known:
        return known[name]
    if name in PASSED:
        return PASSED[name]
    if is_function(name):
        raise ConfigError(
            f"{key}={name}: stands for a function that a Python program passed, which is not here; name a "
            "function in a file, as package.module:function"
        )
    module_name, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    if not module_name or not attribute:
        raise ConfigError(
            f"{key}={name!r} is unknown{did_you_mean(name, known)} (known: {', '.join(sorted(known))}; "
            "or the import path of your own function, package.module:function)"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{key}={name!r}: the module {module_name!r} cannot be imported ({error}); "
            f"is its folder on PYTHONPATH? (built in: {', '.join(sorted(known))})"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(f"{key}={name!r}: the module {module_name!r} has no function {attribute!r}")
    return function


def require_parameters(function: Function, available: Collection[str], *, key: str) -> None:
    """Raise ``ConfigError`` if a parameter without a default is not in ``available``."""
    if unknown := sorted(required_parameters(function) - set(available)):
        raise ConfigError(
            f"{key} requires {', '.join(unknown)}, which it cannot get "
            f"(available: {', '.join(sorted(available))}; give other parameters a default)"
        )


def with_options(
    function: Function,
    options: Mapping[str, Any],
    *,
    key: str,
    name: str,
    computed: Collection[str],
    available: Collection[str],
) -> Function:
    """Return the function called ``name`` of ``key`` with the ``options`` that ``<key>_kwargs`` gives it.

    Raises:
        ConfigError: an option is in ``computed``, the inputs that the run gives, or the function has no
            parameter for it, or it requires one that is not ``available``.
    """
    if taken := sorted(options.keys() & set(computed)):
        raise ConfigError(f"{key}_kwargs: {', '.join(taken)} cannot be set here: the run gives them")
    if unknown := sorted(options.keys() - accepted(function, options).keys()):
        raise ConfigError(f"{key}_kwargs: {key}={name!r} does not take {', '.join(unknown)}")
    found = functools.partial(function, **options) if options else function
    require_parameters(found, {*available, *options}, key=f"{key}={name!r}")
    return found


def required_parameters(function: Function) -> frozenset[str]:
    """Return the names of the parameters without a default."""
    return frozenset(
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    )


def accepted(function: Function, available: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``available`` that the function has parameters for; all for ``**kwargs``."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(available)
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in available.items() if name in names}


def call(function: Function, available: Mapping[str, Any]) -> Any:
    """Call the function with the entries of ``available`` that it accepts.

    Raises:
        ConfigError: ``available`` lacks a parameter that has no default.
    """
    if missing := sorted(required_parameters(function) - available.keys()):
        raise ConfigError(
            f"{name_of(function)} requires {', '.join(missing)}, which this run does not compute "
            f"(available: {', '.join(sorted(available))})"
        )
    return function(**accepted(function, available))


def name_of(function: Function) -> str:
    """Return the function's name for error texts; the bound function's name of a ``functools.partial``."""
    if isinstance(function, functools.partial):
        function = function.func
    return function.__name__ if inspect.isroutine(function) else repr(function)
