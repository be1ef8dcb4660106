"""From the section ``environment`` of a configuration to what a rollout needs of it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from strop.algorithms.registry import resolve
from strop.config.paths import expand
from strop.config.schema.environment import EnvironmentConfig
from strop.environments.episode import Blueprint
from strop.environments.gym import load_gym
from strop.environments.mcp import load_mcp
from strop.errors import ConfigError
from strop.passed import is_function
from strop.rewards.custom import load_module
from strop.rewards.sandbox import require_bubblewrap
from strop.tools import Python

_KEY = "environment.path"
_SERVERS = ("mcp", "mcp-shared")
_TOOLS = "file.py:function, file.py:Class, python, mcp:COMMAND or mcp:URL"


@dataclass(frozen=True)
class Environments:
    """The environments and tools of a run, as the rollout's processes get them."""

    blueprint: bytes
    """The pickled ``Blueprint``; only the processes of ``pool`` unpickle it."""
    search_path: list[str]
    """``sys.path`` of these processes."""
    schemas: Mapping[str, list[dict[str, Any]]]
    """JSON schemas of the tools, by the name of the environment ("": of all rows)."""
    gives_rewards: bool
    has_reset: bool
    """There is an environment, not only tools."""

    def tools_of(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the JSON schemas of the tools of a row; ``ValueError`` if it names no environment."""
        if "" in self.schemas:
            return self.schemas[""]
        name = row.get("environment")
        if name not in self.schemas:
            raise ValueError(
                f"found {name!r:.80}, expected one of {', '.join(self.schemas)} (environment.path)"
            )
        return self.schemas[str(name)]


def load_environments(section: EnvironmentConfig) -> Environments | None:
    """Load the classes and functions that ``environment`` names; None if it names none.

    Raises ``ConfigError`` for a file or a name that is not there, a class without ``reset``, a tool that
    cannot be described, or an object that cannot be pickled.
    """
    if not section.path and not section.tools:
        return None
    environments = {name: _environment(given) for name, given in section.path.items()}
    for name, found in environments.items():
        if not isinstance(found, type) or not callable(getattr(found, "reset", None)):
            raise ConfigError(
                f"{_KEY}={section.path[name]}: expected a class with a method reset, found {found!r:.80}"
            )
    tools = [_tool(given) for given in section.tools]
    blueprint = Blueprint(environments, tools)
    schemas = blueprint.schemas()
    for name, own in schemas.items():
        if not own and not hasattr(environments.get(name), "respond"):
            raise ConfigError(
                f"{_KEY}={section.path.get(name)}: it has neither tools (public methods) nor "
                "respond(response, turn), so that nothing answers a turn"
            )
    try:
        pickled = cloudpickle.dumps(blueprint)
    # Pickling runs user code, which may raise anything.
    except Exception as error:
        raise ConfigError(
            f"{_KEY}: the environment cannot be pickled for its process ({error}); keep open files, locks "
            "and models out of its class, and open them in reset"
        ) from error
    return Environments(
        pickled,
        list(sys.path),
        schemas,
        blueprint.gives_rewards(),
        bool(environments),
    )


def _environment(given: str) -> Any:
    """Return the class that an entry of environment.path names."""
    kind, _, name = given.partition(":")
    if kind == "gym":
        return load_gym(name)
    if kind in _SERVERS:
        return load_mcp(given, _KEY)
    found = load_object(given, _KEY)
    if isinstance(found, type) or hasattr(found, "reset"):
        return found
    made = type(found())  # a factory, as TRL takes them
    return type(made.__name__, (made,), {"__new__": lambda _: found()})


def _tool(given: str) -> Any:
    """Return the function or class that an entry of environment.tools names."""
    key = "environment.tools"
    if given.partition(":")[0] in _SERVERS:
        return load_mcp(given, key)
    found = Python if given == "python" else load_object(given, key)
    if isinstance(found, type) and issubclass(found, Python):
        require_bubblewrap()
        found().python("")  # RewardError if user namespaces are forbidden
    return found


def load_object(given: str, key: str) -> Any:
    """Return the class or function of ``file.py:name``, or of a name that stands for one."""
    if is_function(given):
        return resolve(given, {}, key)
    path, has_name, name = given.rpartition(":")
    if not has_name or not path.endswith(".py"):
        known = {_KEY: "file.py:Class, gym:ID or mcp:COMMAND", "environment.tools": _TOOLS}
        raise ConfigError(f"{key}={given}: expected {known.get(key, 'file.py:function')}")
    path = str(Path(expand(path)).absolute())
    module = load_module(path, key)
    # the processes do not import the file again: its siblings are found by the search path
    cloudpickle.register_pickle_by_value(module)
    found = vars(module).get(name)
    if not callable(found):
        own = [
            word
            for word, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__
        ]
        raise ConfigError(f"{key}={given}: {path} has no {name}; it has {', '.join(own) or 'nothing'}")
    return found
