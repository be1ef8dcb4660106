"""Prompts and responses as token ids.

A prompt is a list of chat messages, ``[{"role": ..., "content": ...}, ...]``, rendered with the tokenizer's
chat template and a generation prompt, or a plain string. :class:`PromptFormat` is the treatment of both.
Control tokens in these texts are text, unless it allows them.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from strop.data.control_tokens import PromptError, control_tokens, is_escaped
from strop.data.pictures.parts import (
    Expansion,
    as_parts,
    is_of_texts,
    is_place,
    parts_problem,
    text_of,
    with_places,
)
from strop.errors import DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EXPECTED = "expected a list of {role, content} messages or a string"

Item = TypeVar("Item")
Kind = TypeVar("Kind", bound=Hashable)


@dataclass(frozen=True)
class PromptFormat:
    """Treatment of a prompt before it is tokenized; the keys under ``data`` have the same names."""

    apply_chat_template: bool | Literal["auto"] = "auto"
    """Make a plain string a user message; "auto": if the tokenizer has a chat template."""
    system_prompt: str | None = None
    """First message of a chat that has no system message."""
    apply_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as ``enable_thinking``."""
    allow_special_tokens: bool = False
    """Encode control tokens in texts as control tokens."""

    @classmethod
    def of(cls, data: Any) -> PromptFormat:
        """Read the section ``data`` of a configuration."""
        return cls(**{key.name: getattr(data, key.name) for key in fields(cls)})

    def is_chat(self, tokenizer: Any, *, is_text: bool) -> bool:
        """Return True if the chat template renders the prompts; ``is_text``: they are plain strings."""
        if is_text and self.apply_chat_template == "auto":
            return tokenizer.chat_template is not None
        return not is_text or self.apply_chat_template is True

    def messages(self, prompt: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the prompt as chat messages with the system prompt; see ``as_messages``."""
        messages = as_messages(prompt)
        if self.system_prompt is None or any(message["role"] == "system" for message in messages):
            return messages
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def in_words(self, tokenizer: Any, *, is_text: bool, n_continued: int = 0, n_with_tools: int = 0) -> str:
        """Return one line on the treatment of prompts, of which ``n_continued`` end in an open turn.

        Raises :class:`ModelError` for a chat template that is needed and missing, and :class:`DataError` for
        settings that such prompts cannot have.
        """
        setting = f"data.apply_chat_template={str(self.apply_chat_template).lower()}"
        has_template = tokenizer.chat_template is not None
        if not self.is_chat(tokenizer, is_text=is_text):
            why = setting if has_template else f"{setting}, and the tokenizer has no chat template"
            for key in ("system_prompt", "apply_chat_template_kwargs"):
                if getattr(self, key):
                    raise DataError(f"data.{key} needs a chat template, but prompts stay plain text ({why})")
            hint = "" if has_template else "; data.chat_template=FILE, or an instruction-tuned model, has one"
            return f"prompts: plain text, tokenized as it stands ({why}{hint})"
        if not has_template:
            raise _no_template(tokenizer, setting if is_text else "prompts of chat messages")
        if self.apply_chat_template is False:
            raise DataError(
                f"{setting}: the prompts are chat messages, which only a chat template can make text of; "
                "store the texts as plain strings, or leave the key at auto"
            )
        how = "the chat template"
        if self.apply_chat_template_kwargs:
            given = [f"{key}={value}" for key, value in self.apply_chat_template_kwargs.items()]
            how += f" with {', '.join(given)}"
        if self.system_prompt is not None:
            how += ", after data.system_prompt"
        if writes_date(tokenizer):
            how += ", which may write today's date (on another day the same prompts have other tokens)"
        if n_with_tools:
            how += f", {n_with_tools} of them with tools"
        if is_text:
            return f"prompts: plain text; each becomes a user message of {how} ({setting})"
        line = f"prompts: chat messages, rendered by {how}"
        return line + (
            f"; {n_continued} end with an assistant turn, which is continued" if n_continued else ""
        )


AUTO = PromptFormat()


def _no_template(tokenizer: Any, needed_for: str) -> ModelError:
    return ModelError(
        f"the tokenizer {tokenizer.name_or_path!r} has no chat template, which {needed_for} need: use an "
        "instruction-tuned model's tokenizer, set data.chat_template, or store the prompts as plain strings "
        "with data.apply_chat_template=auto"
    )


def prompt_problem(value: Any) -> str | None:
    """Return the reason why ``value`` is not a prompt, or None if it is one."""
    if isinstance(value, str):
        return None if value else f"{EXPECTED}, found an empty string"
    if not isinstance(value, list) or not value:
        return f"{EXPECTED}, found {_describe(value)}"
    for number, message in enumerate(value):
        fields = message if isinstance(message, dict) else {}
        role, content = fields.get("role"), fields.get("content")
        if isinstance(role, str) and isinstance(content, list):
            if problem := parts_problem(content):
                return f"{EXPECTED}; in message {number} {problem}"
        elif {"from", "value"} <= fields.keys():
            return (
                f"{EXPECTED}, found {_describe(message)} as message {number}, a form of ShareGPT: write "
                "{'role': 'user', 'content': ...}; 'human' is 'user', 'gpt' is 'assistant'"
            )
        elif not isinstance(role, str) or not (isinstance(content, str) or _only_calls(fields)):
            return f"{EXPECTED}, found {_describe(message)} as message {number}"
    return None


def _only_calls(message: Mapping[str, Any]) -> bool:
    """Return True for OpenAI's form of a turn that only calls tools."""
    return message.get("content") is None and bool(message.get("tool_calls"))


def chat_of_text(text: str | None) -> list[dict[str, Any]] | None:
    """Return the chat that a text holds as JSON, or as pandas writes lists into CSV; None for other texts."""
    value = _parsed(text) if text and text.lstrip().startswith("[") else None
    return value if isinstance(value, list) and value and all(map(_is_message, value)) else None


def _parsed(text: str) -> Any:
    """Return what a text holds as JSON or in Python's notation; the text itself if it is neither."""
    for read in (json.loads, ast.literal_eval):
        # TypeError: a set in a set, which is Python and has no value
        with contextlib.suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return read(text.strip())
    return text


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and "role" in value and bool({"content", "tool_calls"} & value.keys())


def tools_of(value: Any) -> list[dict[str, Any]] | None:
    """Return a row's tools, JSON schemas or their JSON text, as a list; None without tools.

    Raises ``ValueError`` for anything else.
    """
    given = _parsed(value) if isinstance(value, str) else value
    if not given:
        return None
    if isinstance(given, list):
        tools = [_parsed(tool) if isinstance(tool, str) else tool for tool in given]
        if all(isinstance(tool, dict) for tool in tools):
            return tools
    raise ValueError(
        f"expected a list of JSON schemas of tools, or JSON text, found {_describe(value)}; if the column "
        "has something else, set data.tools_key=null"
    )


def as_messages(prompt: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the prompt as chat messages; a plain string becomes one user message.

    Keys without a value are dropped: Arrow gives every message the keys of all others, and templates test for
    presence. Parts are joined if all are texts. The content of a message that only calls tools is empty, and
    arguments of calls that are JSON text, as in OpenAI's API, are mappings, as templates expect them.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    chat = [{key: value for key, value in message.items() if value is not None} for message in prompt]
    for message in chat:
        content = message.setdefault("content", "")  # templates add it to other texts
        if is_of_texts(content):
            message["content"] = text_of(content)
    return _with_arguments(chat, _as_mapping)


def _with_arguments(chat: list[dict[str, Any]], form: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """Return the messages with ``form`` of the arguments of each tool call."""

    def formed(call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or "arguments" not in function:
            return call
        return {**call, "function": {**function, "arguments": form(function["arguments"])}}

    return [
        {**message, "tool_calls": [formed(call) for call in calls]}
        if isinstance(calls := message.get("tool_calls"), list)
        else message
        for message in chat
    ]


def _as_mapping(arguments: Any) -> Any:
    with contextlib.suppress(TypeError, ValueError):
        if isinstance(found := json.loads(arguments), dict):
            return found
    return arguments


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def encode_prompts(
    prompts: list[str] | list[list[dict[str, Any]]],
    tokenizer: PreTrainedTokenizerBase,
    how: PromptFormat = AUTO,
    tools: Sequence[str | None] | None = None,
    pictures: Sequence[Expansion] | None = None,
) -> list[list[int]]:
    """Return token ids of every prompt; all strings or all message lists, as in a column of a table.

    ``tools`` are those of each prompt as the JSON of a list, or None; the chat template renders them.
    ``pictures`` are the texts of each prompt's; None: prompts with pictures are refused.

    A chat that ends with an assistant's message is continued: its turn stays open. Other chats get the
    template's generation prompt. Plain strings that are no chats get the special tokens that the tokenizer
    adds, such as a BOS.

    Raises :class:`PromptError` for the first prompt that is malformed, rejected by the template or without
    tokens, and :class:`ModelError` for chats when the tokenizer has no chat template.
    """
    for offset, prompt in enumerate(prompts):
        if problem := prompt_problem(prompt):
            raise PromptError(offset, problem)
    tools = [None] * len(prompts) if tools is None else tools
    own = [None] * len(prompts) if pictures is None else pictures
    try:
        encoded = _encode(prompts, tools, own, tokenizer, how)
    except ModelError:
        raise
    except Exception:  # noqa: BLE001
        # Templates raise anything; encoding one by one finds the rejected prompt and raises again.
        each = zip(prompts, tools, own, strict=True)
        encoded = [_encode_one(offset, *one, tokenizer, how) for offset, one in enumerate(each)]
    for offset, ids in enumerate(encoded):
        if len(ids) == 0:
            raise PromptError(offset, "the prompt has no tokens")
    for offset, problem, other in _changed(prompts, _shown_by(tokenizer)):
        found = None
        with contextlib.suppress(PromptError):  # a template that reads calls may refuse answers without
            found = _encode_one(offset, other, tools[offset], own[offset], tokenizer, how)
        if found == encoded[offset]:
            raise PromptError(offset, problem)
    return encoded


_MARK = "zqxjkvbp"
_SHOWN: weakref.WeakKeyDictionary[Any, tuple[Any, set[str]]] = weakref.WeakKeyDictionary()


def _shown_by(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the roles that the chat template is known to show, and "tool_calls"; the set grows."""
    template, known = _SHOWN.get(tokenizer, (None, set()))
    if template != tokenizer.chat_template or not known:
        known = {"user", "assistant"}
        _SHOWN[tokenizer] = tokenizer.chat_template, known
    return known


def _changed(prompts: Sequence[Any], known: set[str]) -> Iterator[tuple[int, str, list[dict[str, Any]]]]:
    """Yield prompts that must differ from the given ones once they are encoded, and the problem if not.

    Each is an offset, the problem and messages, of which tool calls or the text of a role have changed:
    Qwen's template renders nothing of roles that it does not know. The first of a kind stands for all:
    what a prompt has shown is ``known``, and grows as the caller asks for the next one.
    """
    for offset, prompt in enumerate(prompts):
        for number, message in enumerate(prompt if isinstance(prompt, list) else []):
            if message.get("tool_calls") and "tool_calls" not in known:
                bare = [{**each, "tool_calls": None, "content": each.get("content") or ""} for each in prompt]
                yield (
                    offset,
                    "the chat template leaves out the tool calls of its messages: write them into their "
                    "content, or use a template that shows them (data.chat_template)",
                    bare,
                )
                known.add("tool_calls")
            if (role := message["role"]) not in known:
                content = [*as_parts(message.get("content") or ""), {"type": "text", "text": f" {_MARK}"}]
                longer = {**message, "content": text_of(content) if is_of_texts(content) else content}
                yield (
                    offset,
                    f"the chat template leaves out messages of the role {role!r}: name the role as the "
                    "template does (user, assistant, system, tool), or use one that shows them "
                    "(data.chat_template)",
                    [*prompt[:number], longer, *prompt[number + 1 :]],
                )
                known.add(role)


def writes_date(tokenizer: Any) -> bool:
    """Return True if the chat template may write today's date, as those of Llama 3.2 and gpt-oss."""
    return "strftime_now" in str(tokenizer.chat_template)


_SPACES = ("\u2581", "\u0120")
"""Characters that stand for a space in tokens."""


def texts_before_answers(
    tokenizer: PreTrainedTokenizerBase, how: PromptFormat, *, is_chat: bool
) -> tuple[str, ...]:
    """Return texts of which the first that fits is put before an answer where it is encoded.

    Tokenizers as those of Llama 2, Mistral and Phi-3 add a space to the beginning of a text. An answer does
    not begin one: it follows the generation prompt, or continues a plain prompt. Empty for tokenizers that
    add no space, and for prompts that were rendered beforehand: these end in a control token, after which
    the space is added.
    """
    try:
        first: Any = tokenizer.convert_ids_to_tokens(tokenizer.encode("a", add_special_tokens=False)[:1])
    except Exception:  # noqa: BLE001 - one of the user's may have no such letter
        return ()
    if not first or not str(first[0]).startswith(_SPACES):
        return ()
    if not is_chat:
        return () if how.allow_special_tokens else ("0", "\n")  # a digit may be a part of a longer token
    prompt, whole = _rendered_probe(tokenizer, how)
    if not whole:
        return ()
    space = whole.removeprefix(prompt).partition(_MARK)[0]
    return (prompt.rpartition(_MARK)[2] + (space if space.isspace() else ""),)


def control_tokens_around_answers(
    tokenizer: PreTrainedTokenizerBase, how: PromptFormat, end: str
) -> tuple[list[int], list[int]]:
    """Return ids that the chat template writes before an answer and after it, up to the token ``end``.

    Only those with control tokens: ``<|channel|>final<|message|>`` of gpt-oss, and Command's
    ``<|START_RESPONSE|>`` and ``<|END_RESPONSE|>``. A prompt ends before the first of them, so that a model
    generates them, and its answers are read by them.
    """
    prompt, whole = _rendered_probe(tokenizer, how)
    before, found, after = whole.removeprefix(prompt).partition(_MARK)
    control = control_tokens(tokenizer)
    parts = [before, after.partition(end)[0]] if found and end in after else []
    if not whole.startswith(prompt) or not any(name in part for part in parts for name in control.names):
        return [], []
    before_ids, after_ids = control.encode(parts, add_special_tokens=False)
    return before_ids, after_ids


def _rendered_probe(tokenizer: PreTrainedTokenizerBase, how: PromptFormat) -> tuple[str, str]:
    """Return a prompt as the chat template writes it, and the same with its answer; "" if it cannot."""
    options = dict(how.apply_chat_template_kwargs)
    chat = as_taken([{"role": role, "content": _MARK} for role in ("user", "assistant")], tokenizer)
    try:
        prompt, whole = (
            str(tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=opens, **options))
            for given, opens in ((chat[:1], True), (chat, False))
        )
    except Exception:  # noqa: BLE001 - templates raise anything; the data's own is reported
        return "", ""
    return prompt, whole


_THINK = "<think>"


def thinking_before_answers(tokenizer: PreTrainedTokenizerBase, how: PromptFormat) -> str:
    """Return the ``<think>``, with white space after it, that the chat template ends prompts with, or "".

    Prompts whose last message is the assistant's end with that instead.
    """
    chat: list[Any] = as_taken(how.messages(_MARK), tokenizer)
    options: dict[str, Any] = {"add_generation_prompt": True, **how.apply_chat_template_kwargs}
    try:
        prompt = str(tokenizer.apply_chat_template(chat, tokenize=False, **options))
    except Exception:  # noqa: BLE001 - templates raise anything; the data's own is reported
        return ""
    found = re.search(rf"{_THINK}\s*\Z", prompt)
    return found[0] if found else ""


def second_tag(thinking: str) -> str:
    """Return the pattern of a tag at the beginning of an answer after ``thinking_before_answers``."""
    return rf"\A\s*{_THINK}(?:{thinking.removeprefix(_THINK)})?"


@dataclass(frozen=True)
class ResponseEncoder:
    """``encode_responses`` with its options."""

    before: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()

    def __call__(
        self, texts: list[str], tokenizer: PreTrainedTokenizerBase, how: PromptFormat = AUTO
    ) -> list[list[int]]:
        """See ``encode_responses``."""
        return encode_responses(texts, tokenizer, how, before=self.before, ends=self.ends)


def encode_responses(
    texts: list[str],
    tokenizer: PreTrainedTokenizerBase,
    how: PromptFormat = AUTO,
    *,
    before: Sequence[str] = (),
    ends: Sequence[str] = (),
) -> list[list[int]]:
    """Return token ids of every response with the end token last, as generated by a model that stops.

    ``before`` are the texts of ``texts_before_answers``, whose own ids are left out. White space behind one
    of the tokens ``ends``, as chat templates write it after a turn, is left out, too.

    Raises :class:`PromptError` for the first value that is not a string.
    """
    for offset, text in enumerate(texts):
        if not isinstance(text, str):
            raise PromptError(offset, f"expected a string, found {_describe(text)}")
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer {tokenizer.name_or_path!r} has no end token for responses; "
            "set tokenizer.eos_token"
        )
    control = control_tokens(tokenizer)
    texts = texts if how.allow_special_tokens else control.escape(texts)
    texts = [text.rstrip() if text.rstrip().endswith(tuple(ends)) else text for text in texts]
    encoded = control.encode(texts, add_special_tokens=False)
    for prefix in reversed(before):  # the first one that fits stays
        # a space that the template writes after its generation prompt is a part of the answer
        (own,) = control.encode([prefix.rstrip(" ")], add_special_tokens=False)
        if tokenizer.unk_token_id in own:
            continue
        after = control.encode([prefix + text for text in texts], add_special_tokens=False)
        encoded = [
            ids[len(own) :] if ids[: len(own)] == own else alone
            for ids, alone in zip(after, encoded, strict=True)
        ]
    return [[*ids, tokenizer.eos_token_id] for ids in encoded]


def encode_raw(
    prompt: str | list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, how: PromptFormat = AUTO
) -> list[int]:
    """Return token ids of the text alone, messages joined by line ends: no template, no special tokens."""
    chat = [] if isinstance(prompt, str) else as_messages(prompt)
    parts = [[part for part in as_parts(message["content"]) if not is_place(part)] for message in chat]
    text = prompt if isinstance(prompt, str) else "\n".join(map(text_of, parts))
    control = control_tokens(tokenizer)
    text = text if how.allow_special_tokens else control.escape(text)
    return control.encode([text], add_special_tokens=False)[0]


def _encode(
    prompts: Sequence[Any],
    tools: Sequence[str | None],
    pictures: Sequence[Expansion | None],
    tokenizer: PreTrainedTokenizerBase,
    how: PromptFormat,
    *,
    form: Callable[[Any], Any] | None = None,
) -> list[list[int]]:
    """Encode prompts of one kind; ``form`` is applied to the arguments of tool calls."""
    if not prompts:
        return []
    control = control_tokens(tokenizer)
    is_chat = how.is_chat(tokenizer, is_text=isinstance(prompts[0], str))
    values: list[Any] = [how.messages(prompt) for prompt in prompts] if is_chat else list(prompts)
    if is_chat:
        pairs = zip(values, pictures, strict=True)
        values = [_with_contents(chat, own, tokenizer) for chat, own in pairs]
    elif any(own and own.texts for own in pictures):
        raise PromptError(0, "the row has pictures, and only a chat template can give them a place")
    if form is not None:
        values = [_with_arguments(chat, form) for chat in values]
    if not how.allow_special_tokens:
        values = control.escape(values)
    if not is_chat:
        if any(tools):
            raise PromptError(0, "it has tools (data.tools_key), which only a chat template can render")
        # A text that was rendered beforehand has the BOS already.
        bos = tokenizer.bos_token if how.allow_special_tokens else None

        def encode_texts(texts: list[Any], begins_with_bos: bool) -> list[list[int]]:
            return control.encode(texts, add_special_tokens=not begins_with_bos)

        return _in_groups(values, [bool(bos) and text.startswith(bos) for text in values], encode_texts)
    if tokenizer.chat_template is None:
        raise _no_template(tokenizer, "chat messages")

    def encode_chats(chats: list[Any], kind: tuple[bool, str | None, Expansion | None]) -> list[list[int]]:
        are_continued, tools_json, expansion = kind
        own_tools = {"tools": json.loads(tools_json)} if tools_json else {}
        if not how.allow_special_tokens:
            own_tools = control.escape(own_tools)
        options: dict[str, Any] = {
            **how.apply_chat_template_kwargs,
            **own_tools,
            "add_generation_prompt": not are_continued,
            "continue_final_message": are_continued,
            "return_dict": False,  # a list, not a BatchEncoding
        }
        if expansion is None and not is_escaped([*chats, own_tools]):
            encoded: Any = tokenizer.apply_chat_template(chats, tokenize=True, **options)
            return encoded
        # the template writes the BOS itself, so none is added to its text
        texts: Any = tokenizer.apply_chat_template(chats, tokenize=False, **options)
        if expansion is None:
            return control.encode(texts, add_special_tokens=False)
        # as the processors of transformers: theirs is added where the template writes none
        adds_bos = not (tokenizer.bos_token and texts[0].startswith(tokenizer.bos_token))
        texts = [expansion.expanded(text) for text in texts]
        return control.encode(texts, add_special_tokens=adds_bos)

    continued = [chat[-1]["role"] == "assistant" for chat in values]
    return _in_groups(values, list(zip(continued, tools, pictures, strict=True)), encode_chats)


def _in_groups(
    values: list[Item],
    kinds: Sequence[Kind],
    encode: Callable[[list[Item], Kind], list[list[int]]],
) -> list[list[int]]:
    """Encode the values of each of ``kinds`` apart; return all in order."""
    groups: dict[Kind, list[Item]] = {}
    for value, kind in zip(values, kinds, strict=True):
        groups.setdefault(kind, []).append(value)
    encoded = {kind: iter(encode(own, kind)) for kind, own in groups.items()}
    return [next(encoded[kind]) for kind in kinds]


def _with_contents(
    chat: list[dict[str, Any]], pictures: Expansion | None, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """Return messages with contents as the chat template takes them: in parts with pictures, else texts."""
    if pictures is not None:
        return with_places(chat, len(pictures.texts))
    for message in chat:
        text_of(message["content"])  # raises for a picture
    return with_places(chat, 0) if takes_parts_alone(tokenizer) else chat


def as_taken(chat: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Return messages with contents as the chat template takes them: as they are, or as lists of parts."""
    if not takes_parts_alone(tokenizer):
        return [dict(message) for message in chat]
    return [{**message, "content": as_parts(message.get("content") or "")} for message in chat]


_PARTS_ALONE: weakref.WeakKeyDictionary[Any, tuple[Any, bool]] = weakref.WeakKeyDictionary()


def takes_parts_alone(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if the chat template leaves out contents that are texts, as SmolVLM's and LLaVA's do."""
    template, known = _PARTS_ALONE.get(tokenizer, (None, False))
    if template != tokenizer.chat_template:
        template, word = tokenizer.chat_template, "strop"
        found = []
        for content in (word, [{"type": "text", "text": word}]):
            chat: list[Any] = [{"role": "user", "content": content}]
            text: Any = ""
            with contextlib.suppress(Exception):  # templates raise anything
                text = tokenizer.apply_chat_template(chat, tokenize=False)
            found.append(word in text)
        known = found == [False, True]
        _PARTS_ALONE[tokenizer] = template, known
    return known


def _encode_one(
    offset: int,
    prompt: Any,
    tools: str | None,
    pictures: Expansion | None,
    tokenizer: PreTrainedTokenizerBase,
    how: PromptFormat,
) -> list[int]:
    try:
        if isinstance(prompt, list) and any("tool_calls" in message for message in prompt):
            with contextlib.suppress(TypeError):  # templates that join arguments with text
                return _encode([prompt], [tools], [pictures], tokenizer, how, form=_as_text)[0]
        return _encode([prompt], [tools], [pictures], tokenizer, how)[0]
    except ModelError:
        raise
    except PromptError as error:
        raise PromptError(offset, error.reason) from error
    except Exception as error:  # whatever the template raises concerns this prompt
        raise PromptError(
            offset, f"rejected by the chat template: {type(error).__name__}: {error}"
        ) from error


def _describe(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__} {value!r:.60}"
