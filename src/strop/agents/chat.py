"""Requests for chat completions: their messages, compared and as token ids.

Messages are compared in a canonical form, without what clients add, drop or format differently.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from strop.data.bridge import Bridge, Call
from strop.data.pictures.parts import Shown, digests_in, joined
from strop.data.pictures.read import alive_parts
from strop.data.prompts import PromptError, PromptFormat, as_messages, encode_prompts
from strop.data.tool_calls import find_parser, opens_thinking, require_schemas, text_before, text_of_turn
from strop.environments.episode import as_objects
from strop.environments.loading import load_object
from strop.errors import ConfigError, DataError, ModelError, reword
from strop.pictures import Picture

if TYPE_CHECKING:
    from strop.config.schema import Config
    from strop.data.pictures.expand import PromptPictures

TOO_LONG = "context_length_exceeded"
_LIMITS = ("max_completion_tokens", "max_tokens")
_THOUGHT = re.compile(r"\s*<think>(.*?)(?:</think>(.*)|$)", re.DOTALL)
_HARMONY = re.compile(
    r"\s*(?:<\|channel\|>analysis<\|message\|>(.*?)(?:<\|end\|>(?:<\|start\|>assistant)?|$))?"
    r"(?:<\|channel\|>final<\|message\|>)?(.*)",
    re.DOTALL,
)
"""An answer of gpt-oss: its analysis, and what is said."""
_BRIDGES = 64
_WITHOUT_ANSWERS = (
    "use a chat template that shows answers of tools (in a run data.chat_template), or send no tools, and "
    "what they answer as messages of the user"
)
_BETWEEN = "\ufdd0"
"""Character of no text, in the place of a picture."""
_SERVED = {
    *("messages", "model", "tools", "max_tokens", "max_completion_tokens", "stop", "temperature", "top_p"),
    *("stream", "stream_options"),
    # of no influence on an answer
    *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "metadata", "store"),
    "service_tier",
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "functions": ([],),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True, False),
}
"""Parameters that cannot be chosen freely -> the values that are served."""


class Refusal(Exception):
    """A request that is not served: the HTTP status, one line, and OpenAI's name for the reason."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class ChatRequest(NamedTuple):
    """A request, checked."""

    messages: list[dict[str, Any]]
    history: tuple[str, ...]
    """The messages in canonical form."""
    tools: list[dict[str, Any]]
    shown: str
    """The tools in canonical form."""
    max_tokens: int | None
    stop: tuple[str, ...]
    is_one_call: bool
    """Calls of an answer after its first are left out."""
    sampling: dict[str, float]
    """temperature and top_p, where the request has them."""
    pictures: tuple[Picture, ...] = ()
    """Pictures of the messages, which name them."""

    def after(self, before: ChatRequest, history: tuple[str, ...]) -> ChatRequest:
        """Return the request with the objects of the one ``before``, of which it repeats ``history``."""
        n = len(before.messages)
        return self._replace(
            messages=[*before.messages, *self.messages[n:]],
            history=(*history, *self.history[len(history) :]),
            tools=before.tools,
            shown=before.shown,
        )


class ChatAnswer(NamedTuple):
    """An answer as text."""

    content: str
    thinking: str
    calls: tuple[Call, ...]
    malformed: str
    """The reason why its calls are left in the content; "" if there is none."""


def read_request(body: Any, *, seeded: bool = False) -> ChatRequest:
    """Check the body of a request. Raises ``Refusal`` for one that cannot be served as it asks.

    ``seeded``: it may name a seed.
    """
    if not isinstance(body, dict):
        raise Refusal(400, f"the body is {type(body).__name__}, expected an object with messages")
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise Refusal(400, f"messages: found {given!r:.80}, expected a list of messages")
    for name in sorted(body.keys() - _SERVED - ({"seed"} if seeded else set())):
        if (value := body[name]) is not None and value not in (served := _NEUTRAL.get(name, ())):
            instead = f", or send {' or '.join(map(json.dumps, served))}" if served else ""
            raise Refusal(400, f"{name}={value!r:.80} is not served here: leave it out{instead}")
    pictures: list[Picture] = []
    messages = [_message(number, message, pictures) for number, message in enumerate(given)]
    if messages[-1]["role"] == "assistant":
        raise Refusal(400, "the last message is an assistant's, which is not continued: end with another one")
    tools = _tools(body)
    most = next((found for name in _LIMITS if (found := body.get(name)) is not None), None)
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise Refusal(400, f"max_tokens={most!r:.80}: expected a number above 0")
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise Refusal(400, f"stop={stop!r:.80}: expected texts")
    return ChatRequest(
        messages,
        tuple(map(canonical, messages)),
        tools,
        json.dumps(tools, sort_keys=True),
        most,
        tuple(stop),
        body.get("parallel_tool_calls") is False,
        {name: _number(body, name) for name in ("temperature", "top_p") if body.get(name) is not None},
        tuple(pictures),
    )


def _number(body: Mapping[str, Any], name: str) -> float:
    value = body[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1000:
        raise Refusal(400, f"{name}={value!r:.80}: expected a number from 0 on")
    return float(value)


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the functions that a request offers; ``Refusal`` for others."""
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict)
        and isinstance(function := tool.get("function"), dict)
        and isinstance(function.get("name"), str)
        for tool in tools
    ):
        raise Refusal(400, f"tools: found {tools!r:.80}, expected functions with name and parameters")
    given = [] if body.get("tool_choice") == "none" else [(tool, tool["function"].items()) for tool in tools]
    return [
        as_objects({**tool, "function": {key: one for key, one in own if one is not None}})
        for tool, own in given
    ]


def _message(number: int, given: Any, pictures: list[Picture]) -> dict[str, Any]:
    """Return a message as chat templates take it; add its pictures to ``pictures``."""
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise Refusal(400, f"messages[{number}]: found {given!r:.80}, expected role and content")
    content = given.get("content")
    if isinstance(content, list):
        try:
            content, found = alive_parts(content, f"messages[{number}]")
        except DataError as error:
            raise Refusal(400, str(error)) from error
        pictures += found
    if not isinstance(content, str | list | None):
        raise Refusal(400, f"messages[{number}]: content is {content!r:.80}, expected a text or parts")
    if not isinstance(content, list):
        content = (content or "").encode(errors="replace").decode()  # no tokenizer takes lone surrogates
    message = {"role": "system" if given["role"] == "developer" else given["role"], "content": content}
    kept = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking")
    message |= {key: given[key] for key in kept if isinstance(given.get(key), str) and given[key]}
    if calls := given.get("tool_calls"):
        if not isinstance(calls, list):
            raise Refusal(400, f"messages[{number}]: tool_calls is {calls!r:.80}, expected a list of calls")
        message["tool_calls"] = [_call(number, call) for call in calls]
    return message


def _call(number: int, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refusal(400, f"messages[{number}]: found the call {call!r:.80}, expected name and arguments")
    written = {"name": function["name"], "arguments": function.get("arguments") or "{}"}
    return {"id": str(call.get("id") or ""), "type": "function", "function": written}


def canonical(message: Mapping[str, Any]) -> str:
    """Return what counts of a message, as text."""
    content = message["content"]
    if isinstance(content, list):  # pictures, and the texts between them
        texts = "".join(part["text"] if part["type"] == "text" else _BETWEEN for part in content)
        first, *others = map(str.strip, texts.split(_BETWEEN))
        content = [first, *others, *digests_in([message])] if others else first
    elif message["role"] == "assistant":
        content = split_thinking(content)[1].strip()
    else:
        content = content.strip()
    kept: dict[str, Any] = {"role": message["role"], "content": content}
    if calls := message.get("tool_calls"):
        kept["calls"] = [[call["function"]["name"], _parsed(call["function"]["arguments"])] for call in calls]
    return json.dumps(kept, sort_keys=True, ensure_ascii=False)


def _parsed(arguments: Any) -> Any:
    try:
        return json.loads(arguments, parse_float=_number_of)
    except (TypeError, ValueError, RecursionError):
        return arguments


def _number_of(text: str) -> float:
    """Return 1 for 1.0, as JavaScript writes it."""
    value = float(text)
    return int(value) if value.is_integer() else value


def split_thinking(text: str, prompt_end: str = "") -> tuple[str, str]:
    """Return the think block at the beginning of an answer, and the text after it.

    ``prompt_end``: text before the answer, which may have opened the block.
    """
    if opens_thinking(prompt_end):
        text = f"<think>{text}"
    found = _HARMONY.fullmatch(text) if "<|channel|>" in text else _THOUGHT.match(text)
    return ((found[1] or "").strip(), found[2] or "") if found else ("", text)


class ChatFormat:
    """Messages as token ids, and token ids as messages."""

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        stop_ids: Sequence[int],
        parser: str = "auto",
        pictures: PromptPictures | None = None,
    ) -> None:
        """``stop_ids`` end an answer, besides those of the configuration.

        ``pictures``: their texts; None: messages with pictures are refused.
        """
        self.pictures = pictures
        self.how = PromptFormat.of(config.data)
        self._tokenizer, self._parser_name = tokenizer, parser
        self._stops = [*stop_ids, *config.actor_rollout_ref.rollout.stop_token_ids]
        self._bridges: dict[str, Bridge] = {}
        self._parser: Any = None

    def bridge(self, request: ChatRequest) -> Bridge:
        """Return the bridge for a request's tools; ``Refusal`` if the chat template has none."""
        if request.shown not in self._bridges:
            while len(self._bridges) >= _BRIDGES:  # descriptions of tools may have the time of day
                self._bridges.pop(next(iter(self._bridges)))
            try:
                require_schemas(request.tools)
                self._bridges[request.shown] = Bridge(
                    self._tokenizer,
                    self._stops,
                    self.how,
                    tools=request.tools,
                    pictures=self.pictures,
                    remedy=_WITHOUT_ANSWERS,
                )
            except ModelError as error:
                raise Refusal(400, str(error)) from error
        self._bridges[request.shown] = bridge = self._bridges.pop(request.shown)  # the newest is the last
        return bridge

    def parser(self) -> Any:
        """Return the parser of calls; ``Refusal`` if none follows from the chat template."""
        if self._parser is None:
            texts = [text for stop in self._stops if (text := self._tokenizer.decode([stop]))]
            options = dict(self.how.apply_chat_template_kwargs)
            try:
                self._parser = find_parser(
                    self._parser_name,
                    self._tokenizer,
                    options,
                    texts,
                    lambda given: load_object(given, "agent.parser"),
                )
            except (ModelError, ConfigError) as error:
                raise Refusal(400, _of_agent(str(error))) from error
        return self._parser

    def prompt(self, request: ChatRequest) -> Shown:
        """Return the ids of all messages of a request, to the generation prompt."""
        tools, own = json.dumps(request.tools) if request.tools else None, None
        digests = digests_in(request.messages)
        try:
            messages = self.how.messages(request.messages)
            if self.pictures is not None:
                own = [self.pictures.expansion(digests)]
            (ids,) = encode_prompts([messages], self._tokenizer, self.how, [tools], own)
            ids = [*map(int, ids)]
            return Shown(ids) if self.pictures is None else self.pictures.shown(ids, digests)
        except (PromptError, ModelError) as error:
            reason = error.reason if isinstance(error, PromptError) else error
            raise Refusal(400, f"the chat template does not show the messages: {reason}") from error

    def following(self, request: ChatRequest, n_before: int, *, is_stopped: bool) -> Shown:
        """Return the ids after an answer, which is the message ``n_before - 1``, to the generation prompt.

        ``is_stopped``: the answer ended with a stop token; else the template's is the first of them.
        """
        bridge = self.bridge(request)
        answer, *messages = as_messages(request.messages[n_before - 1 :])
        names = {call["id"]: call["function"]["name"] for call in answer.get("tool_calls", ())}
        calls = [
            Call(call["function"]["name"], call["function"]["arguments"], call["id"])
            for call in answer.get("tool_calls", ())
        ]
        for message in messages:
            if message["role"] == "tool" and "name" not in message:
                message["name"] = names.get(message.get("tool_call_id", ""), "")
        try:
            shown = bridge.shown(messages, calls)
        except ModelError as error:
            raise Refusal(400, str(error)) from error
        return shown if is_stopped else joined(Shown([bridge.end_id]), shown)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of an answer, without its stop token."""
        return text_of_turn(self._tokenizer, ids, self._stops)

    def ends(self, ids: Sequence[int]) -> bool:
        """Return True if the last of ``ids`` is a stop token."""
        return bool(ids) and ids[-1] in self._stops

    def plain(self, ids: Sequence[int]) -> str:
        """Return the text of an answer without special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def read(self, request: ChatRequest, before: Sequence[int], ids: Sequence[int]) -> ChatAnswer:
        """Return the answer of ``ids`` that follow the ids ``before``."""
        text = self.text(ids)
        for stop in request.stop:
            text = text.partition(stop)[0]
        end = text_before(self._tokenizer, before)
        thinking, content = split_thinking(text, end)
        if not request.tools:
            return ChatAnswer(content, thinking, (), "")
        try:
            turn = self.parser()(text, end, request.tools)
        except ConfigError as error:  # of a function of the user's
            reword(error, _of_agent)
            raise
        calls, malformed = turn.calls[: 1 if request.is_one_call else None], turn.malformed
        if len(calls) > 1 and self.bridge(request).one_call:
            malformed = "expected one call in a turn"
        if malformed or not calls:
            return ChatAnswer(content, thinking, (), malformed)
        return ChatAnswer(split_thinking(turn.content)[1], thinking, calls, "")

    def cut_at_stop(self, ids: list[int], stop: Sequence[str]) -> tuple[int, bool]:
        """Return the number of ``ids`` to the end of the first text of ``stop``, and True if there is one."""

        def has(count: int) -> bool:
            text = self.text(ids[:count])
            return any(one in text for one in stop)

        if not stop or not has(len(ids)):
            return len(ids), False
        low, high = 1, len(ids)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if has(middle) else (middle + 1, high)
        return low, True


def _of_agent(text: str) -> str:
    """Return a message about the parser with the key of agents."""
    return text.replace("environment.parser", "agent.parser")


def digest_of(*parts: Any) -> str:
    """Return a digest of plain values."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()
