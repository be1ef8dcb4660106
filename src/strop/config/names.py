"""Names that configuration keys may hold, and what is known of each without importing torch."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from strop.passed import PASSED

TRACKERS: dict[str, str] = {
    "console": "strop.tracking.console:console_tracker",
    "jsonl": "strop.tracking.jsonl:JsonlTracker",
    "file": "strop.tracking.jsonl:JsonlTracker",
    "tensorboard": "strop.tracking.services:TensorboardTracker",
    "wandb": "strop.tracking.services:WandbTracker",
    "trackio": "strop.tracking.services:TrackioTracker",
    "mlflow": "strop.tracking.services:MlflowTracker",
    "swanlab": "strop.tracking.services:SwanlabTracker",
}
"""Name in ``trainer.logger`` -> "module:Class", imported when a run uses it."""

OPTIONAL_PACKAGES = ("tensorboard", "wandb", "trackio", "mlflow", "swanlab")
"""Trackers that need the package, and the extra, of their own name."""

PIXELS_REMEMBERED = 1 << 28
"""Bytes of processed pictures that a process keeps, which a forecast of memory counts."""

SEEN_BOTH_WAYS = {
    "diffusion_gemma": False,
    "gemma3": True,
    "gemma4": False,
    "gemma4_unified": False,
    "git": False,
    "paligemma": False,
    "pi0": False,
    "shieldgemma2": False,
}
"""Family with models in which tokens of a picture attend to each other -> True if passes mark these tokens.

A forward pass without the marks is causal, and raises nothing."""

NO_REWARD = "none"
REWARD_MANAGERS = ("naive", "prime", NO_REWARD)
"""One class with one process or several, or no score in training: ``strop.rewards.loading``."""


@cache
def estimators() -> dict[str, frozenset[str]]:
    """Return the parameters of every built-in advantage estimator, by name."""
    return _registered("advantages.py")


@cache
def policy_losses() -> dict[str, frozenset[str]]:
    """Return the parameters of every built-in policy loss, by name."""
    return _registered("policy_loss.py")


@cache
def preference_losses() -> dict[str, frozenset[str]]:
    """Return the parameters of every built-in preference loss, by name."""
    return _registered("preference.py")


def _registered(file: str) -> dict[str, frozenset[str]]:
    """Return the parameters of the functions in ``algorithms/`` under a decorator ``@register...("name")``.

    The module is parsed, not imported: it needs torch, whose import takes seconds.
    """
    source = Path(__file__).parents[1] / "algorithms" / file
    found = {}
    functions = [node for node in ast.parse(source.read_bytes()).body if isinstance(node, ast.FunctionDef)]
    for node in functions:
        for mark in node.decorator_list:
            match mark:
                case ast.Call(func=ast.Name(), args=[ast.Constant(value=str(key))]):
                    parameters = node.args.args + node.args.kwonlyargs
                    found[key] = frozenset(parameter.arg for parameter in parameters)
    return found


def is_import_path(name: str) -> bool:
    """Return True if ``name`` has the form ``package.module:attribute`` or ``package.module.attribute``."""
    return "." in name.strip(".") or ":" in name.strip(":")


def module_of(import_path: str) -> str:
    """Return the module that an import path names."""
    return import_path.partition(":")[0] if ":" in import_path else import_path.rpartition(".")[0]


def missing_module(dotted: str) -> str | None:
    """Return the first part of a module's name that cannot be found, or None; nothing is imported."""
    return next((name for name, spec in _specs(dotted) if spec is None), None)


def defining_file(import_path: str) -> str | None:
    """Return the file of the module that an import path names; None without one. Nothing is imported."""
    *_, (_, spec) = _specs(module_of(import_path))
    return spec.origin if spec is not None and spec.has_location else None


def _specs(dotted: str) -> Iterator[tuple[str, ModuleSpec | None]]:
    """Yield the name and the place of a module and the packages around it, up to the first missing one."""
    name, folders = "", None
    for word in dotted.split("."):
        name = f"{name}.{word}".lstrip(".")
        if name in sys.modules:
            folders = getattr(sys.modules[name], "__path__", None)
            yield name, sys.modules[name].__spec__ or ModuleSpec(name, None)  # __main__ has none
            continue
        try:
            # The import hooks of editable installs know packages that no path has.
            spec = importlib.util.find_spec(name) if folders is None else PathFinder.find_spec(name, folders)
        except (ImportError, ValueError):
            spec = None
        yield name, spec
        if spec is None:
            return
        folders = spec.submodule_search_locations or []


def is_installed(package: str) -> bool:
    """Return True if a package can be imported; a folder of its name, as wandb leaves one, is none."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # it is imported, and has no spec
        return True
    if spec is None or spec.origin is not None:
        return spec is not None
    # megatron is a namespace of packages
    return any(any(Path(folder).glob("*/__init__.py")) for folder in spec.submodule_search_locations or ())


def inputs_of(estimator: str, unknown: Collection[str] = ()) -> Collection[str]:
    """Return the inputs of an estimator, see ``_inputs``; ``unknown`` of one that is not found here."""
    return _inputs(estimator, estimators(), unknown)


def needs_reference(preference_loss: str) -> bool:
    """Return True if a preference loss takes log-probs of a reference; one that is not found here counts."""
    found = _inputs(preference_loss, preference_losses(), ("ref_chosen_log_prob",))
    return any(name.startswith("ref_") for name in found)


def _inputs(name: str, built_in: Mapping[str, Collection[str]], unknown: Collection[str]) -> Collection[str]:
    """Return the parameters of a built-in function, or those without a default of the user's.

    That is a function of the program, or one at an import path, whose module is parsed: ``unknown`` if it
    defines no such function, or a decorated one.
    """
    if name in PASSED:
        parameters = inspect.signature(PASSED[name]).parameters.values()
        return {parameter.name for parameter in parameters if parameter.default is parameter.empty}
    if name in built_in or not is_import_path(name):
        return built_in.get(name, unknown)
    file, function = defining_file(name), re.split("[.:]", name)[-1]
    if file is None or not os.path.isfile(file):  # a module may lie in a zip file
        return unknown
    return _required_in(file, os.stat(file).st_mtime_ns).get(function, unknown)


@cache
def _required_in(file: str, _changed: int) -> dict[str, frozenset[str]]:
    """Return the parameters without a default of the functions that a module defines without a decorator."""
    try:
        body = ast.parse(Path(file).read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # the latter: null bytes
        return {}
    found = {}
    for node in body:
        if isinstance(node, ast.FunctionDef) and not node.decorator_list:
            own, by_name = node.args.posonlyargs + node.args.args, node.args.kwonlyargs
            required = own[: len(own) - len(node.args.defaults)]
            required += [
                one for one, default in zip(by_name, node.args.kw_defaults, strict=True) if not default
            ]
            found[node.name] = frozenset(parameter.arg for parameter in required)
    return found


def needs_critic(adv_estimator: str) -> bool:
    """Return True if the estimator takes values; one that is not found here counts."""
    return "values" in inputs_of(adv_estimator, ("values",))


def sets_noise(override: Mapping[str, Any]) -> bool:
    """Return True if the values turn on noise that only training passes have, such as dropout."""
    return any(
        sets_noise(value)
        if isinstance(value, Mapping)
        else ("drop" in key or "jitter" in key) and isinstance(value, int | float) and value > 0
        for key, value in override.items()
    )
