"""Tool calls in the text of a turn.

The text is read by ``parse_response`` of transformers with a response template: regular expressions for the
notation of a model family. ``find_parser`` takes the template that comes with the tokenizer, or the one of
``NOTATIONS`` that reads back a call that the chat template writes. A call that cannot be read, or does not
fit the schema of its tool, makes the turn malformed, and none of its calls is run.
"""

from __future__ import annotations

import ast
import contextlib
import json
import pickle
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from strop.data.bridge import Call, call_message
from strop.data.prompts import as_taken
from strop.errors import ConfigError, ModelError

_SEEN_BEFORE = 8  # tokens
_LIST_OF_CALLS = re.compile(r"\[\s*[\w.]+\(")
_START = "\0"
"""Stands for the beginning of a turn; no text has it."""


class Turn(NamedTuple):
    """A turn of the policy."""

    text: str
    """Without the stop token."""
    calls: tuple[Call, ...] = ()
    malformed: str = ""
    """The reason why its calls cannot be run; "" if there is none."""
    content: str = ""
    """The text without calls and thinking."""


def _notation(calls: Mapping[str, Any], *, thinking: str | None = r"</think>\s*") -> dict[str, Any]:
    """Return a response template; ``thinking``: expression that closes a think block, None: there is none."""
    fields: dict[str, Any] = {}
    if thinking:
        fields["reasoning_content"] = {"open": "<think>", "close_pattern": thinking, "content": "text"}
    fields["tool_calls"] = {"repeats": True, **calls}
    fields["content"] = {"close_pattern": "$", "content": "text"}
    return {"defaults": {"role": "assistant"}, "start_anchor": _START, "fields": fields}


_WHOLE = {"content": "json", "transform": {"type": "function", "function": "{content}"}}
"""A call is one JSON object, {"name": ..., "arguments": {...}}."""
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_ARGUMENTS = {"content": "json", "transform": _NAMED}
"""The name stands before the JSON of the arguments."""
_TO_FUNCTION = (
    r"to=functions\.(?P<name>[\w.-]+)(?:<\|channel\|>commentary)?\s*+(?:<\|constrain\|>\s*)?json<\|message\|>"
)


_RAW = "xml-inline"
"""transformers' name of a content whose values stand between tags, as they are."""


def _tags(before: str, after: str) -> dict[str, Any]:
    """Return the fields of calls whose arguments stand between tags; values have the end tag."""
    values = {
        "tag_pattern": rf"{before}(?P<value>(?:(?!{after}).)*+(?:{after}|$))",
        "value_parser": {"name": "text", "args": {"strip": False}},
    }
    return {"content": _RAW, "content_args": values, "transform": _NAMED}


NOTATIONS: dict[str, dict[str, Any]] = {
    "hermes": _notation({"open": "<tool_call>", "close_pattern": r"</tool_call>\s*", **_WHOLE}),
    "qwen_coder": _notation(
        {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n<>]+)>",
            "close_pattern": r"</function>\s*</tool_call>\s*",
            **_tags(r"<parameter=(?P<key>[^<>\n]+)>\n?", r"\n?</parameter>"),
        }
    ),
    "glm": _notation(
        {
            "open_pattern": r"<tool_call>\s*(?P<name>[\w.-]+)\s*(?=<arg_key>|</tool_call>)",
            "close_pattern": r"</tool_call>\s*",
            **_tags(r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>", r"</arg_value>"),
        },
        thinking=r"</think>\s*|(?=<tool_call>)",  # a call ends the thinking
    ),
    "llama": _notation(
        {
            "open_pattern": r'(?:<\|python_tag\|>)?\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
            "close_pattern": r"\}\s*$",
            **_ARGUMENTS,
        },
        thinking=None,
    ),
    "mistral": _notation(
        {
            "open_pattern": r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]",
            "close_pattern": r"(?=\[TOOL_CALLS\])|$",
            **_ARGUMENTS,
        },
        thinking=None,
    ),
    "mistral_list": _notation(
        {
            "open_pattern": r"\[TOOL_CALLS\]\s*(?=\[\s*\{)",
            "close_pattern": "$",
            "content": "json",
        },
        thinking=None,
    ),
    "harmony": _notation(
        {
            # not (?:...)?: with an optional beginning a partial search is quadratic
            "open_pattern": rf"<\|channel\|>commentary\s*{_TO_FUNCTION}|{_TO_FUNCTION}",
            "close_pattern": r"<\|call\|>|$",
            **_ARGUMENTS,
        },
        thinking=None,
    ),
    "deepseek": _notation(
        {
            "open_pattern": r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>[\w.-]+)"
            r"(?:<｜tool▁sep｜>|\s*```json\n)",
            "close_pattern": r"(?:\n```)?<｜tool▁call▁end｜>",
            **_ARGUMENTS,
        }
    ),
}
"""Name -> response template."""
_TAGS = {
    "qwen_coder": (r"(?:\A|\n)<parameter=[^<>\n]+>", r"\n?</parameter>"),
    "glm": (r"<arg_key>[^<]+</arg_key>\s*<arg_value>", "</arg_value>"),
}
"""Name -> beginning and end of an argument, of those whose arguments stand between tags."""
PYTHONIC = "pythonic"
"""Calls in Python's notation, ``[look_up(word="x")]``, alone or between the tokens of LFM2."""
_LISTS = _notation(
    {"open": "<|tool_call_start|>", "close_pattern": r"<\|tool_call_end\|>\s*", "content": "text"}
)
"""Response template of the lists between these tokens, as texts."""

Parser = Callable[[str, str, Sequence[Mapping[str, Any]]], Turn]
"""(text of a turn, end of the prompt before it, JSON schemas of the tools) -> the turn."""


def find_parser(
    name: str,
    tokenizer: Any,
    options: Mapping[str, Any],
    stops: Sequence[str],
    load: Callable[[str], Callable[..., Any]],
) -> Parser:
    """Return the parser of the calls of a model.

    ``name``: one of ``NOTATIONS``, ``pythonic``, ``file.py:function`` (text -> a list of (name, arguments);
    ValueError: malformed), loaded by ``load``, or ``auto``. ``options`` are variables of the chat template,
    ``stops`` the texts of the stop tokens.

    Raises ``ConfigError`` for an unknown name, ``ModelError`` if no parser reads what the template writes.
    """
    if name == "auto":
        return _reading_back(tokenizer, options, stops)
    if name in NOTATIONS:
        return _reading(NOTATIONS[name], _TAGS.get(name))
    if name == PYTHONIC:
        return _reading(_LISTS)
    if ".py:" in name:
        return _calling(load(name))
    known = ", ".join((*NOTATIONS, PYTHONIC))
    raise ConfigError(f"environment.parser={name!r}: expected auto, {known}, or file.py:function")


def _reading_back(tokenizer: Any, options: Mapping[str, Any], stops: Sequence[str]) -> Parser:
    """Return the parser that reads a call from what the chat template writes for it.

    The first one that is tried is that of the tokenizer's own ``response_template``, if it has one.
    """
    properties = {"word": {"type": "string", "description": "The word."}}
    parameters = {"type": "object", "properties": properties, "required": ["word"]}
    schema = {"name": "look_up", "description": "Look up a word.", "parameters": parameters}
    tools = [{"type": "function", "function": schema}]
    call = Call("look_up", {"word": "w 1é"})
    hello, found = [{"role": "user", "content": "Hi"}], ""
    own: Mapping[str, Any] = getattr(tokenizer, "response_template", None) or {}
    parsers = {}
    if own:  # of its anchors one alone is allowed
        fields = {key: value for key, value in own.items() if not key.startswith("start_anchor")}
        parsers["response_template"] = _reading({**fields, "start_anchor": _START})
    parsers |= {name: _reading(template, _TAGS.get(name)) for name, template in NOTATIONS.items()}
    parsers[PYTHONIC] = _reading(_LISTS)
    for as_text in (False, True):
        # templates raise anything
        with contextlib.suppress(Exception):
            rendered = {"tokenize": False, **options, "tools": tools}
            chat = as_taken([*hello, call_message([call], as_text=as_text)], tokenizer)
            prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, **rendered)
            whole = tokenizer.apply_chat_template(chat, **rendered)
            if call.arguments["word"] not in whole:
                continue
            # of equal beginnings; the prompt may have a think block that is left out here
            pairs = enumerate(zip(prompt, whole, strict=False))
            begun = next((place for place, (one, other) in pairs if one != other), len(prompt))
            ends = (whole.index(stop, begun) for stop in stops if stop in whole[begun:])
            end = min(ends, default=len(whole))
            found = whole[begun:end]
            # earlier by up to 20 characters: the two may have the first ones of the notation in common
            for start in range(begun, max(begun - 20, -1), -1):
                for parse in parsers.values():
                    turn = parse(whole[start:end], "", tools)
                    if [read[:2] for read in turn.calls] == [call[:2]]:
                        return parse
    names = ", ".join((*NOTATIONS, PYTHONIC))
    written = f"it writes a call as {found!r:.200}, which no parser reads" if found else "it writes no calls"
    raise ModelError(
        f"the chat template of {tokenizer.name_or_path!r} does not say how the model writes tool calls: "
        f"{written}; set environment.parser to one of {names}, or to file.py:function"
    )


def _reading(template: Mapping[str, Any], tags: tuple[str, str] | None = None) -> Parser:
    """Return a parser by a response template; ``tags``: beginning and end of each of its arguments."""
    from transformers.utils.chat_parsing import parse_response  # seconds

    is_raw = template.get("fields", {}).get("tool_calls", {}).get("content") == _RAW

    def parse(text: str, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> Turn:
        opened = "<think>" if opens_thinking(prompt_end) else ""
        try:
            # without the tools: transformers makes "007" of the types string or integer a 7
            found = parse_response(text, dict(template), prefix=_START + opened)
            answered, content = found.get("tool_calls") or [], found.get("content", "")
            if template is _LISTS:
                answered, content = _pythonic(answered, content)
            if isinstance(answered, dict):  # of a template with one call in a turn
                answered = [answered]
            elif answered and isinstance(answered[0], list):  # a list for the whole turn
                answered = [call for calls in answered for call in calls]
            calls = [_call_of(call) for call in answered]
            for name, arguments in calls:
                if tags:
                    arguments.update(_without_tags(arguments, *tags))
                known = _properties(tools, name)
                arguments.update(
                    (key, _cast(value, known.get(key, {}), is_raw=is_raw))
                    for key, value in arguments.items()
                    if isinstance(value, str)
                )
        except (ValueError, TypeError, RecursionError) as error:
            return Turn(text, malformed=f"the call cannot be read: {_reason(error)}", content=text)
        return _checked(text, content, calls, tools)

    return parse


def _without_tags(values: Mapping[str, str], begin: str, end: str) -> dict[str, str]:
    """Return the values without their end tags; ``ValueError`` for one that has none."""
    found = {}
    for key, value in values.items():
        own = re.fullmatch(rf"(.*?){end}", value, re.DOTALL)
        if own is None or re.search(begin, value):  # one without its end reaches to that of a later one
            raise ValueError(f"the argument {key!r:.80} has no end")
        found[key] = own[1]
    return found


def _properties(tools: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """Return the schemas of the arguments of a tool; of an unknown one none."""
    for tool in tools:
        if tool["function"]["name"] == name:
            return tool["function"].get("parameters", {}).get("properties") or {}
    return {}


_WORDS = {"true": True, "false": False, "none": None, "null": None}


def _cast(text: str, schema: Mapping[str, Any], *, is_raw: bool) -> Any:
    """Return an argument that stands as text, as the value that its schema takes.

    ``is_raw``: nothing but the schema says what is a text, which then stays as it is written.
    """
    types, word = _types_of(schema), text.strip()
    if is_raw and "null" in types and word in ("null", "None"):
        return None
    if _fits(text, schema) and (types or not is_raw):
        return text
    # what models write in place of JSON's values; last a text without the blanks around it, of an enumeration
    words = _WORDS | ({"1": True, "0": False} if "boolean" in types else {})
    loose = (lambda word: words[word.lower()], int, float, str) if types or "enum" in schema else ()
    for read in (json.loads, *loose):
        with contextlib.suppress(ValueError, LookupError, RecursionError):
            if _fits(value := read(word), schema):
                return value
    return text


def _calling(function: Callable[[str], Any]) -> Parser:
    """Return a parser by a function of the text."""

    def parse(text: str, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> Turn:
        try:
            found = [(str(name), dict(arguments)) for name, arguments in function(text) or ()]
        except ValueError as error:
            return Turn(text, malformed=f"the call cannot be read: {_reason(error)}", content=text)
        # A user's function may raise anything.
        except Exception as error:
            raise ConfigError(
                f"environment.parser: {type(error).__name__}: {error} for the turn {text!r:.200}; expected a "
                "list of (name, arguments), or a ValueError for a call that cannot be read"
            ) from error
        return _checked(text, "" if found else text, found, tools)

    return parse


def text_of_turn(tokenizer: Any, ids: Sequence[int], stop_ids: Collection[int]) -> str:
    """Return the text of a turn, without its stop token."""
    own = ids[:-1] if ids and ids[-1] in stop_ids else ids
    return tokenizer.decode(own, skip_special_tokens=False)


def text_before(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text before a turn as far as its parser sees it: what the generation prompt has opened."""
    return tokenizer.decode(ids[-_SEEN_BEFORE:], skip_special_tokens=False)


def opens_thinking(prompt_end: str) -> bool:
    """Return True if a text ends within a think block."""
    return prompt_end.rfind("<think>") > prompt_end.rfind("</think>")


def _reason(error: Exception) -> str:
    return str(error).strip().rpartition("\n")[2].removeprefix("Error: ")[:200]


def _call_of(call: Any) -> tuple[str, dict[str, Any]]:
    """Return name and arguments; ``ValueError`` if they are none."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("expected an object with name and arguments")
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):  # JSON within JSON
        arguments = json.loads(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError(
            f"arguments of {function['name']}: expected an object, found {type(arguments).__name__}"
        )
    return function["name"], arguments


def _pythonic(lists: Sequence[str], content: str) -> tuple[list[dict[str, Any]], str]:
    """Return the calls of ``lists``, without any of a content that is such a list; and the other content.

    Raises ``ValueError`` for a list without calls.
    """
    if not lists:
        is_list = _LIST_OF_CALLS.match(content) and content.endswith("]")  # [0, 1) or (2, 3] is an answer
        calls = _calls_in(content) if is_list else []
        return calls, "" if calls else content
    found = [_calls_in(text) for text in lists]
    if not all(found):
        raise ValueError("expected a list of calls, as [name(word='x')]")
    return [call for calls in found for call in calls], content


def _calls_in(text: str) -> list[dict[str, Any]]:
    """Return the calls in a list of Python's notation; ``ValueError`` for a text that is no such notation."""
    try:
        tree = ast.parse(text, mode="eval").body
        elements = tree.elts if isinstance(tree, ast.List) else []
        calls = [call for call in elements if isinstance(call, ast.Call)]
        if any(call.args for call in calls):
            raise ValueError("arguments are given by name, as in [name(word='x')]")
        return [
            {
                "name": ast.unparse(call.func),
                "arguments": {str(key.arg): ast.literal_eval(key.value) for key in call.keywords},
            }
            for call in calls
        ]
    # a dict as a key, thousands of brackets
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from error


def _checked(
    text: str, content: str, calls: Sequence[tuple[str, dict[str, Any]]], tools: Sequence[Mapping[str, Any]]
) -> Turn:
    """Return the turn, malformed if a call does not fit the schema of its tool."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
    for name, arguments in calls:
        if name not in schemas:
            found = f"there is no tool {name!r:.80}; the tools are {', '.join(schemas)}"
            return Turn(text, malformed=found, content=content)
        properties = schemas[name].get("properties", {})
        required = schemas[name].get("required", [])
        unknown = () if _is_open(schemas[name]) else arguments.keys() - properties.keys()
        problems = [f"it has no argument {key!r:.80}" for key in arguments if key in unknown]
        problems += [f"the argument {key!r} is missing" for key in required if key not in arguments]
        try:  # lone surrogates, sets, NaN, and what is nested too deeply reach neither a process nor a file
            pickle.dumps(json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode() and arguments)
        except (TypeError, ValueError, RecursionError) as error:
            problems.append(f"the arguments are no JSON: {_reason(error)}")
        problems += [
            f"{key}={value!r:.80} is no {_type_in_words(properties[key])}"
            for key, value in arguments.items()
            if key in properties and not _fits(value, properties[key])
        ]
        if problems:
            expected = ", ".join(f"{key}: {_type_in_words(known)}" for key, known in properties.items())
            return Turn(text, malformed=f"{name}({expected}): {'; '.join(problems)}", content=content)
    return Turn(text, tuple(Call(*call) for call in calls), content=content)


def _is_open(schema: Mapping[str, Any]) -> bool:
    """Return True if a tool takes arguments that its ``properties`` do not name."""
    others = ("patternProperties", "allOf", "anyOf", "oneOf", "$ref")
    return schema.get("additionalProperties", False) is not False or any(schema.get(one) for one in others)


def require_schemas(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``ModelError`` for a tool whose schema cannot be read, which its first call would find."""
    for tool in tools:
        name = tool["function"]["name"]
        try:
            keys = tool["function"].get("parameters", {}).get("properties", {})
            _checked("", "", [(name, dict.fromkeys(keys))], tools)
        except (AttributeError, TypeError, LookupError) as error:
            raise ModelError(f"tools: the schema of {name!r:.80} cannot be read: {error}") from error


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def _types_of(schema: Mapping[str, Any]) -> list[str]:
    given = schema.get("type", [])
    types = [given] if isinstance(given, str) else list(given)
    choices = [_types_of(choice) for choice in [*schema.get("anyOf", []), *schema.get("oneOf", [])]]
    if all(choices):  # else one of them, such as a $ref, takes anything
        types += [name for found in choices for name in found]
    return [*types, "null"] if schema.get("nullable") and types else types


def _type_in_words(schema: Mapping[str, Any]) -> str:
    if choices := schema.get("enum"):
        return " or ".join(map(repr, [*choices, *([None] if schema.get("nullable") else [])]))
    return " or ".join(_types_of(schema)) or "value"


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Return True if a value has one of the types of its schema; False is no number."""
    types = _types_of(schema)
    if value is None and schema.get("nullable"):  # transformers leaves null out of the enumeration
        return True
    if "enum" in schema and value not in schema["enum"]:
        return False
    return not types or any(
        isinstance(value, _TYPES.get(name, object)) and (name == "boolean" or not isinstance(value, bool))
        for name in types
    )
