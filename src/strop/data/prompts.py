"""Prompts and responses as token ids.

A prompt is a list of chat messages, ``[{"role": ..., "content": ...}, ...]``, rendered with the tokenizer's
chat template and a generation prompt, or a plain string. :class:`PromptFormat` is the treatment of both.
Control tokens in these texts are text, unless it allows them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from strop.data.control_tokens import PromptError, control_tokens, is_escaped
from strop.errors import DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EXPECTED = "expected a list of {role, content} messages or a string"

Item = TypeVar("Item")


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

    def in_words(self, tokenizer: Any, *, is_text: bool, n_continued: int = 0) -> str:
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
            return f"prompts: plain text, tokenized as it stands ({why})"
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
        texts = [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            return f"{EXPECTED}, found {_describe(message)} as message {number}"
    return None


def as_messages(prompt: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the prompt as chat messages; a plain string becomes one user message.

    Keys without a value are dropped: Arrow gives every message the keys of all others, and templates test for
    presence.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [{key: value for key, value in message.items() if value is not None} for message in prompt]


def encode_prompts(
    prompts: list[str] | list[list[dict[str, Any]]],
    tokenizer: PreTrainedTokenizerBase,
    how: PromptFormat = AUTO,
) -> list[list[int]]:
    """Return token ids of every prompt; all strings or all message lists, as in a column of a table.

    A chat that ends with an assistant's message is continued: its turn stays open. Other chats get the
    template's generation prompt. Plain strings that are no chats get the special tokens that the tokenizer
    adds, such as a BOS.

    Raises :class:`PromptError` for the first prompt that is malformed, rejected by the template or without
    tokens, and :class:`ModelError` for chats when the tokenizer has no chat template.
    """
    for offset, prompt in enumerate(prompts):
        if problem := prompt_problem(prompt):
            raise PromptError(offset, problem)
    try:
        encoded = _encode(prompts, tokenizer, how)
    except (PromptError, ModelError):
        raise
    except Exception:  # noqa: BLE001
        # Templates raise anything; encoding one by one finds the rejected prompt and raises again.
        encoded = [_encode_one(offset, prompt, tokenizer, how) for offset, prompt in enumerate(prompts)]
    for offset, ids in enumerate(encoded):
        if len(ids) == 0:
            raise PromptError(offset, "the prompt has no tokens")
    return encoded


def encode_responses(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, how: PromptFormat = AUTO
) -> list[list[int]]:
    """Return token ids of every response with the end token last, as generated by a model that stops.

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
    encoded = control.encode(texts, add_special_tokens=False)
    return [[*ids, tokenizer.eos_token_id] for ids in encoded]


def encode_raw(
    prompt: str | list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, how: PromptFormat = AUTO
) -> list[int]:
    """Return token ids of the text alone, messages joined by line ends: no template, no special tokens."""
    text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
    control = control_tokens(tokenizer)
    text = text if how.allow_special_tokens else control.escape(text)
    return control.encode([text], add_special_tokens=False)[0]


def _encode(prompts: Sequence[Any], tokenizer: PreTrainedTokenizerBase, how: PromptFormat) -> list[list[int]]:
    if not prompts:
        return []
    control = control_tokens(tokenizer)
    is_chat = how.is_chat(tokenizer, is_text=isinstance(prompts[0], str))
    values = [how.messages(prompt) for prompt in prompts] if is_chat else list(prompts)
    if not how.allow_special_tokens:
        values = control.escape(values)
    if not is_chat:
        # A text that was rendered beforehand has the BOS already.
        bos = tokenizer.bos_token if how.allow_special_tokens else None

        def encode_texts(texts: list[Any], begins_with_bos: bool) -> list[list[int]]:
            return control.encode(texts, add_special_tokens=not begins_with_bos)

        return _in_two_groups(values, lambda text: bool(bos) and text.startswith(bos), encode_texts)
    if tokenizer.chat_template is None:
        raise _no_template(tokenizer, "chat messages")

    def encode_chats(chats: list[Any], are_continued: bool) -> list[list[int]]:
        options: dict[str, Any] = {
            **how.apply_chat_template_kwargs,
            "add_generation_prompt": not are_continued,
            "continue_final_message": are_continued,
            "return_dict": False,  # a list, not a BatchEncoding
        }
        if not is_escaped(chats):
            encoded: Any = tokenizer.apply_chat_template(chats, tokenize=True, **options)
            return encoded
        # the template writes the BOS itself, so none is added to its text
        texts: Any = tokenizer.apply_chat_template(chats, tokenize=False, **options)
        return control.encode(texts, add_special_tokens=False)

    return _in_two_groups(values, lambda chat: chat[-1]["role"] == "assistant", encode_chats)


def _in_two_groups(
    values: list[Item],
    is_of_second: Callable[[Item], bool],
    encode: Callable[[list[Item], bool], list[list[int]]],
) -> list[list[int]]:
    """Encode the values of which ``is_of_second`` is False and the others apart; return all in order."""
    kinds = [is_of_second(value) for value in values]
    encoded = {
        kind: iter(encode([value for value, own in zip(values, kinds, strict=True) if own is kind], kind))
        for kind in set(kinds)
    }
    return [next(encoded[kind]) for kind in kinds]


def _encode_one(offset: int, prompt: Any, tokenizer: PreTrainedTokenizerBase, how: PromptFormat) -> list[int]:
    try:
        return _encode([prompt], tokenizer, how)[0]
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
