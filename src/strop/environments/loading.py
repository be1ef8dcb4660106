"""From the section ``environment`` of a configuration to what a rollout needs of it."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from strop.algorithms.registry import resolve
from strop.config.paths import expand
from strop.config.schema.environment import EnvironmentConfig
from strop.environments.episode import Blueprint, parameters_of
from strop.environments.gym import load_gym
from strop.environments.mcp import load_mcp
from strop.errors import ConfigError
from strop.passed import for_process, is_function
from strop.redaction import redacted_text
from strop.rewards.arguments import Function, require_values
from strop.rewards.custom import load_module
from strop.rewards.sandbox import require_bubblewrap, require_sandbox
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
    without_rewards: Collection[str]
    """Names of the environments that give no rewards."""
    named: Mapping[str, str]
    """The environments, as messages name them, by their names; empty with tools alone."""
    needs: Mapping[str, tuple[Sequence[str], Collection[str]]]
    """Method, as messages name it -> its required parameters, and those that are no columns."""

    @property
    def gives_rewards(self) -> bool:
        """True if an environment gives rewards."""
        return len(self.without_rewards) < len(self.named)

    @property
    def takes_pictures(self) -> bool:
        """True if a method has the parameter ``images``."""
        return any("images" in names for names, _ in self.needs.values())

    def name_of(self, row: Mapping[str, Any]) -> str:
        """Return the environment of a row, as messages name it."""
        return self.named.get("" if "" in self.named else str(row.get("environment")), "environment.tools")

    def require_columns(self, columns: Collection[str]) -> None:
        """Raise ``ConfigError`` if a method has a parameter that is neither a known value nor a column."""
        for where, (names, known) in self.needs.items():
            require_values(where, names, {*known, *columns})

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
    named = {
        name: f"{_KEY}={getattr(environments[name], '__name__', '') if is_function(given) else shown}"
        for name, given in section.path.items()
        for shown in [redacted_text(str(given))]  # a command or an address of an MCP server
    }
    for name, found in environments.items():
        if not isinstance(found, type) or not callable(getattr(found, "reset", None)):
            raise ConfigError(
                f"{named[name]}: expected a class with a method reset(COLUMN, ...), found "
                f"{getattr(found, '__name__', found)} without one; classes without are environment.tools"
            )
        if callable(getattr(found, "done", None)):
            raise ConfigError(
                f"{named[name]}: done is a method, and is read as an attribute: write `self.done = True` "
                "where the sample ends, or make it a property"
            )
    tools = [_tool(given) for given in section.tools]
    for found in (*environments.values(), *tools):
        if isinstance(found, type) and (missing := Function(found, found.__name__).required):
            raise ConfigError(
                f"{found.__name__}() needs the argument {missing[0]!r}, and gets none: take columns of "
                "the row in reset, or give it a default"
            )
    blueprint = Blueprint(environments, tools)
    schemas = blueprint.schemas()
    for name, own in schemas.items():
        if not own and not hasattr(environments.get(name), "respond"):
            raise ConfigError(
                f"{named.get(name, 'environment.tools')}: it has neither tools (public methods) nor "
                "respond(response, turn), so that nothing answers a turn"
            )
    return Environments(
        for_process(blueprint, f"{_KEY}: the environment", "its class, and open them in reset"),
        list(sys.path),
        schemas,
        blueprint.without_rewards(),
        named,
        {
            f"{named[name]}: {method}": needed
            for name, found in environments.items()
            for method, needed in parameters_of(found).items()
        },
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
    if missing := Function(found, _KEY).required:
        raise ConfigError(
            f"{_KEY}: the function {found.__name__} needs {missing[0]!r}: expected a class with a method "
            "reset(COLUMN, ...), or a function without parameters that makes one; tools are environment.tools"
        )
    made = type(found())  # a factory, as TRL takes them
    return type(made.__name__, (made,), {"__new__": lambda _: found()})


def _tool(given: str) -> Any:
    """Return the function or class that an entry of environment.tools names."""
    key = "environment.tools"
    if given.partition(":")[0] in _SERVERS:
        return load_mcp(given, key)
    found = Python if given == "python" else load_object(given, key)
    if not callable(found) or not hasattr(found, "__name__"):
        raise ConfigError(f"{key}: found {found!r:.80}, expected a function or a class")
    own = [name for name in ("reset", "respond", "reward", "get_reward") if hasattr(found, name)]
    if isinstance(found, type) and own:
        raise ConfigError(
            f"{key}: {found.__name__} has {own[0]}, which is called of an environment alone: set {_KEY} to "
            "the class, or rename the method"
        )
    if isinstance(found, type) and issubclass(found, Python):
        require_bubblewrap()
        require_sandbox()
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
