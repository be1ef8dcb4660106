"""An episode: a user's environment and tools for one sample.

An environment is a class. ``reset`` begins an episode; it takes the columns of the sample's row, and
``seed``, by name; a text that it returns is added to the prompt. Public methods are tools, which the policy
calls; ``respond(response, turn)`` answers a turn without calls with a text, a message, a list of messages, or
None at the end; ``reward(...)`` returns a number, or one for each turn; ``close`` ends the episode. All are
optional but ``reset``, and may be ``async def``. The attribute ``done`` ends the episode once it is True.
Plain functions are tools without a state. Answers may have pictures.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import types
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strop.data.pictures.parts import is_of_texts, is_place, picture_in, text_of
from strop.errors import ConfigError, traceback_of
from strop.rewards.arguments import TURN_NAMES, Function, PlayedTurn, conversation_of
from strop.rewards.scorer import LARGEST

RESERVED = ("reset", "respond", "reward", "get_reward", "close", "done")
"""Names of an environment that are no tools."""
LONGEST_TEXT = 100_000
"""Characters of an answer; the end of a longer one is left out."""

Factory = Any
"""A class of the user's."""


@dataclass(frozen=True)
class Blueprint:
    """The classes and functions of episodes, which is pickled for the processes that run them."""

    environments: Mapping[str, Factory] = field(default_factory=dict)
    """Name in the column ``environment`` -> class; the name "" is that of a single one."""
    tools: Sequence[Any] = ()
    """Functions, and classes whose public methods are tools."""

    def environment_of(self, row: Mapping[str, Any]) -> Factory | None:
        """Return the class for a row; None if there are tools only."""
        if not self.environments:
            return None
        return self.environments["" if "" in self.environments else str(row.get("environment"))]

    def schemas(self) -> dict[str, list[dict[str, Any]]]:
        """Return the JSON schemas of the tools, by the name of the environment.

        Raises ``ConfigError`` for a tool without a docstring or type hints, or two of one name.
        """
        return {
            name: _schemas(factory, self.tools) for name, factory in (self.environments or {"": None}).items()
        }

    def without_rewards(self) -> list[str]:
        """Return the names of the environments that have neither ``reward`` nor TRL's ``get_reward``."""
        methods = ("reward", "get_reward")
        return [
            name
            for name, factory in self.environments.items()
            if not any(callable(getattr(factory, method, None)) for method in methods)
        ]


def methods_of(owner: Any) -> dict[str, Callable[..., Any]]:
    """Return the tools of a class or of its object: public methods by name, in the order of the class.

    A class with ``json_schemas`` has the tools that these name, and ``call(name, **arguments)`` runs them.
    """
    if described := _described(owner):
        return {name: functools.partial(owner.call, name) for name in described}
    names = [name for base in reversed(_class(owner).__mro__) for name in vars(base)]
    public = [name for name in dict.fromkeys(names) if not name.startswith("_") and name not in RESERVED]
    kind = _class(owner)  # whose properties have no value yet
    found = {name: getattr(kind, name) for name in public}
    tools = [name for name, value in found.items() if callable(value) and not isinstance(value, type)]
    return {name: getattr(owner, name) for name in tools}


def _described(owner: Any) -> dict[str, dict[str, Any]]:
    return {schema["function"]["name"]: schema for schema in getattr(owner, "json_schemas", ())}


def _defined(owner: type, name: str) -> Any:
    """Return an attribute as its class defines it: a function, or a static method."""
    return next(vars(kind)[name] for kind in owner.__mro__ if name in vars(kind))


def _class(owner: Any) -> type:
    return owner if isinstance(owner, type) else type(owner)


_VALUES = {
    "reset": {"seed"},
    "respond": {"response", "turn"},
    "reward": {*TURN_NAMES, "response"},
    "get_reward": {*TURN_NAMES, "response"},
}
"""Names that the methods of an environment may take besides the columns of the row."""


def parameters_of(environment: type) -> dict[str, tuple[Sequence[str], set[str]]]:
    """Return the required parameters of each method, and the values besides columns that it may take.

    Raises ``ConfigError`` for a method that takes positional arguments only.
    """
    found = {}
    for method, known in _VALUES.items():
        if callable(function := getattr(environment, method, None)):
            if inspect.isfunction(_defined(environment, method)):
                function = types.MethodType(function, object())  # without self
            found[method] = Function(function, f"{environment.__name__}.{method}").required, known
    return found


def _schemas(environment: Any, tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the JSON schemas of an environment's methods and of further tools."""
    from transformers.utils import get_json_schema  # seconds

    found: dict[str, dict[str, Any]] = {}
    for owner in (*([environment] if environment is not None else []), *tools):
        methods = methods_of(owner) if isinstance(owner, type) else {owner.__name__: owner}
        for name, method in methods.items():
            where = f"the tool {name!r} of {getattr(owner, '__name__', owner)}"
            if name in found:
                raise ConfigError(f"{where}: there are two tools of this name")
            if name in (described := _described(owner)):
                found[name] = as_objects(described[name])
                continue
            is_method = isinstance(owner, type) and inspect.isfunction(_defined(owner, name))
            try:
                function = _without_self(method) if is_method else method
                schema = get_json_schema(function)
                _require_json(function)
            # The library raises its own errors, and those of type hints that cannot be resolved.
            except Exception as error:
                reason = " ".join(str(error).split()).rstrip(".!")
                raise ConfigError(
                    f"{where} cannot be described to the model: {reason}. Expected named parameters with "
                    "type hints of JSON (str, int, float, bool, list, dict, Literal), and a docstring with a "
                    "line for each argument below `Args:`"
                ) from error
            schema["function"].pop("return", None)
            schema["function"]["name"] = name  # of a method with two names the library gives the first
            found[name] = schema
    return [*found.values()]


_JSON: tuple[Any, ...] = (str, int, float, bool, type(None), list, tuple, dict, Any)


def _require_json(tool: Callable[..., Any]) -> None:
    """Raise ``ValueError`` for a parameter that no call fills: arguments are values of JSON, by name.

    The library describes ``*args`` as one value, and any class it does not know as an object.
    """
    hints = typing.get_type_hints(tool)
    for name, parameter in inspect.signature(tool).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            shown = parameter.replace(annotation=parameter.empty)
            raise ValueError(f"the parameter {shown} cannot be passed by name")
        for kind in _classes_in(hints.get(name)):
            if kind not in _JSON and not issubclass(kind, dict) and not issubclass(dict, kind):
                raise ValueError(f"the parameter {name} gets JSON, and its hint is {kind.__name__}")


def _classes_in(hint: Any) -> list[type]:
    if typing.get_origin(hint) is typing.Literal:
        return []
    if inner := typing.get_args(hint):
        return [kind for one in inner for kind in _classes_in(one)]
    return [hint] if isinstance(hint, type) else []


def as_objects(schema: Any) -> Any:
    """Return a JSON schema without the schemas True and False, which chat templates do not expect."""
    if isinstance(schema, list):
        return [as_objects(one) for one in schema if one is not False]
    if not isinstance(schema, Mapping):
        return {} if schema is True else schema
    inner = ("function", "parameters", "items", "anyOf", "oneOf", "allOf")
    found = {**schema, **{key: as_objects(schema[key]) for key in inner if key in schema}}
    if isinstance(properties := schema.get("properties"), Mapping):
        kept = {name: as_objects(one) for name, one in properties.items() if one is not False}
        found["properties"] = kept
    return found


def _without_self(method: Any) -> Any:
    """Return a function with the signature of a method as it is called on an object."""

    @functools.wraps(method)
    def bound() -> None: ...

    vars(bound).pop("__wrapped__", None)
    hints = inspect.get_annotations(method, eval_str=True)
    first, *others = inspect.signature(method).parameters.values()
    parameters = [other.replace(annotation=hints.get(other.name, other.annotation)) for other in others]
    vars(bound)["__signature__"] = inspect.Signature(parameters)
    bound.__annotations__ = {name: hint for name, hint in hints.items() if name != first.name}
    return bound


Run = Callable[..., Awaitable[Any]]
"""(function, **arguments) -> its result: awaited, or computed in the episode's thread."""


class Episode:
    """The objects of one sample, in the process that runs them."""

    def __init__(self, blueprint: Blueprint, row: Mapping[str, Any]) -> None:
        self._blueprint, self._row = blueprint, row
        self._environment: Any = None
        self._owners: list[Any] = []
        """The environment, and objects of tools."""
        self._tools: dict[str, Callable[..., Any]] = {}

    async def begin(self, seed: int, run: Run) -> str:
        """Make the objects and reset the environment; return the text of ``reset``, or ""."""
        if (factory := self._blueprint.environment_of(self._row)) is not None:
            self._environment = await run(factory)
            self._owners.append(self._environment)
        for tool in self._blueprint.tools:
            if isinstance(tool, type):
                self._owners.append(await run(tool))
            else:
                self._tools[tool.__name__] = tool
        for owner in self._owners:
            self._tools |= methods_of(owner)
        reset = getattr(self._environment, "reset", None)
        if reset is None:
            return ""
        values = {**self._row, "seed": seed}
        found = await run(reset, **Function(reset, "reset").arguments(values))
        if not isinstance(found, str | None):
            raise TypeError(f"reset returned {found!r:.80}: expected a text for the prompt, or None")
        return as_text(found)

    async def turn(self, turn: Mapping[str, Any], run: Run) -> dict[str, Any]:
        """Run the calls of a turn in their order, or let the environment respond to its text.

        Return texts (an answer to each call, or its parts), messages (the response), the errors among them
        with the last one's traceback, and the reason ``end`` of ``columns.ENDED_BY`` if the episode ends
        here, else "".
        """
        texts, errors, end, trace = [], [], "", ""
        messages: list[dict[str, Any]] | None = None
        for call in turn["calls"]:
            try:
                texts.append(as_content(await run(self._tools[call["name"]], **call["arguments"])))
            # User code may raise anything, SystemExit included.
            except BaseException as error:  # noqa: BLE001
                texts.append(in_one_line(error))
                errors.append(texts[-1])
                trace = traceback_of(error)
        respond = getattr(self._environment, "respond", None)
        if respond is not None and not turn["calls"]:
            values = {**self._row, "response": turn["text"], "turn": turn["number"]}
            try:
                found = await run(respond, **Function(respond, "respond").arguments(values))
            except BaseException as error:  # noqa: BLE001 - likewise
                errors = [found := in_one_line(error)]
                trace = traceback_of(error)
            messages = as_messages(found)  # raises for a result of another form: no turn can mend that
            end = "environment" if messages is None else ""
        elif not turn["calls"]:
            end = "stop"
        # getattr with a default hides an AttributeError within a property
        is_property = isinstance(getattr(type(self._environment), "done", None), property)
        if self._environment.done if is_property else getattr(self._environment, "done", False):
            end = "environment"
        told = {"traceback": trace} if errors else {}
        return {"texts": texts, "messages": messages, "errors": errors, "end": end, **told}

    async def reward(
        self, values: Mapping[str, Any], turns: Sequence[PlayedTurn], run: Run
    ) -> list[float] | None:
        """Return the reward, or one for each turn; None if the environment gives none."""
        found = None
        functions = [getattr(self._environment, name, None) for name in ("reward", "get_reward")]
        function = next(filter(callable, functions), None)  # TRL's examples have numbers called reward
        if function is not None:
            own = {
                "turns": list(turns),
                "conversation": [*values["messages"], *conversation_of(turns)],
                "last_turn": turns[-1].text if turns else "",
                "response": "\n".join(turn.text for turn in turns),
            }
            known = {**self._row, **values, **own}
            found = await run(function, **Function(function, "reward").arguments(known))
        if found is None:
            return None
        found = found.tolist() if hasattr(found, "tolist") else found
        try:
            numbers = [float(value) for value in (found if isinstance(found, list | tuple) else [found])]
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"reward returned {found!r:.80}: expected a number, or one for each turn"
            ) from error
        if len(numbers) not in (1, len(turns)):
            raise ValueError(
                f"reward returned {len(numbers)} numbers for {len(turns)} turns; its argument `turns` has "
                "those that reached no method, too: cut ones, and calls that could not be read"
            )
        if not all(abs(number) <= LARGEST for number in numbers):  # not of NaN
            raise ValueError(f"reward returned {found!r:.80}: expected finite numbers of 32 bits")
        return numbers

    async def close(self, run: Run) -> None:
        """Close the environment and the tools that have ``close``."""
        for owner in self._owners:
            if callable(close := getattr(owner, "close", None)):
                await run(close)


def as_text(value: Any) -> str:
    """Return the text of a tool's result: a text as it is, None as an empty one, else JSON."""
    if not isinstance(value, str):
        value = "" if value is None else json.dumps(value, ensure_ascii=False, default=plain)
    text = value.encode(errors="replace").decode()  # lone surrogates, which no tokenizer takes
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[:LONGEST_TEXT]}\n[{len(text) - LONGEST_TEXT} characters left out]"


def as_content(value: Any) -> str | list[Any]:
    """Return a tool's result as the content of a message: parts if there is a picture, else ``as_text``.

    Pictures are images of PIL, or parts with one, or with bytes, a path or a data URL.
    """
    parts = value if isinstance(value, list | tuple) else [value]
    if not any(map(_is_picture, parts)):
        return as_text(value)
    from strop.data.pictures.read import sendable  # imports pyarrow

    return sendable([{"type": "text", "text": part} if isinstance(part, str) else part for part in parts])


def _is_picture(value: Any) -> bool:
    return (is_place(value) and bool(picture_in(value))) or hasattr(value, "getexif")


def plain(value: Any) -> Any:
    """Return a value of numpy as JSON takes it; of floats the shortest digits."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    is_float = getattr(getattr(value, "dtype", None), "kind", "") == "f"  # torch's have no kind
    return value.astype(str).astype(float).tolist() if is_float else value.tolist()


def as_messages(value: Any) -> list[dict[str, Any]] | None:
    """Return what ``respond`` returned as messages: a text is one of the user. ``TypeError`` for others."""
    if value is None:
        return None
    if isinstance(value, str):
        return [{"role": "user", "content": as_text(value)}]
    messages = [value] if isinstance(value, Mapping) else value
    if not isinstance(messages, list | tuple) or not all(
        isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in messages
    ):
        raise TypeError(f"respond returned {value!r:.80}: expected a text, a message, messages or None")
    contents = [message["content"] for message in messages]
    contents = [text_of(one) if is_of_texts(one) else as_content(one) for one in contents]
    pairs = zip(messages, contents, strict=True)
    return [{"role": str(message["role"]), "content": content} for message, content in pairs]


def in_one_line(error: BaseException) -> str:
    """Return an error as the policy reads it: without addresses, with which no replay would tell the same."""
    try:
        reason = re.sub(r" at 0x[0-9a-fA-F]+", "", " ".join(str(error).split()))
    except BaseException:  # noqa: BLE001 - of a class of the user's
        reason = ""
    return as_text(f"error: {type(error).__name__}: {reason}"[:400].removesuffix(": "))
