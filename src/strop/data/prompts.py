"""What a prompt may be, and its token ids.

A prompt is a list of chat messages, ``[{"role": ..., "content": ...}, ...]``, rendered with the tokenizer's
chat template and a generation prompt; or a plain string, which is tokenized as it stands (with the special
tokens that the tokenizer adds by itself, such as a BOS), never through the chat template.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strop.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EXPECTED = "expected a list of {role, content} messages or a string"


class PromptError(Exception):
    """Prompt number ``offset`` of those given cannot be used; ``reason`` says why. Can be pickled."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(offset, reason)
        self.offset, self.reason = offset, reason


def prompt_problem(value: Any) -> str | None:
    """Why ``value`` is not a prompt, or None when it is one."""
    if isinstance(value, str):
        return None if value else f"{EXPECTED}, found an empty string"
    if not isinstance(value, list):
        return f"{EXPECTED}, found {_describe(value)}"
    if not value:
        return f"{EXPECTED}, found an empty list"
    for number, message in enumerate(value):
        if not isinstance(message, dict):
            return f"{EXPECTED}, found {_describe(message)} as message {number}"
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                found = _describe(message[key]) if key in message else f"only the keys {sorted(message)}"
                return f"{EXPECTED}; the {key} of message {number} must be a string, found {found}"
    return None


def as_messages(prompt: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The prompt as chat messages: a plain string is one user message.

    Keys without a value are left out: Arrow gives every message the keys of all others, and templates test
    for presence.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [{key: value for key, value in message.items() if value is not None} for message in prompt]


def encode_prompts(
    prompts: list[str] | list[list[dict[str, Any]]], tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
    """Token ids of every prompt; all strings or all message lists, as a parquet column holds them.

    Raises :class:`PromptError` for the first prompt that is malformed, that the template refuses or that
    gives no token, and :class:`ModelError` when messages are to be rendered by a tokenizer without a chat
    template.
    """
    for offset, prompt in enumerate(prompts):
        if problem := prompt_problem(prompt):
            raise PromptError(offset, problem)
    try:
        encoded = _encode(prompts, tokenizer)
    except Exception:  # noqa: BLE001
        # A template may raise anything; going one by one finds the prompt that it refused, and raises again.
        encoded = [_encode_one(offset, prompt, tokenizer) for offset, prompt in enumerate(prompts)]
    for offset, ids in enumerate(encoded):
        if len(ids) == 0:
            raise PromptError(offset, "the prompt has no tokens")
    return encoded


def encode_responses(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of every response, the end token last: what a model that stops by itself generates.

    Raises :class:`PromptError` for the first that is not a string.
    """
    for offset, text in enumerate(texts):
        if not isinstance(text, str):
            raise PromptError(offset, f"expected a string, found {_describe(text)}")
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer {tokenizer.name_or_path!r} has no end token to end a response with; "
            "set tokenizer.eos_token"
        )
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    return [[*ids, tokenizer.eos_token_id] for ids in encoded]


def encode_raw(prompt: str | list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of the text alone, messages joined by line ends: no chat template, no special tokens."""
    text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def require_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """:class:`ModelError` when the tokenizer cannot render messages."""
    if tokenizer.chat_template is None:
        raise ModelError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template, but the prompts are chat "
            "messages: use an instruction-tuned model's tokenizer, set tokenizer.chat_template, or store the "
            "prompts as plain strings"
        )


def _encode(prompts: list[Any], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    if not prompts:
        return []
    if isinstance(prompts[0], str):
        return tokenizer(prompts)["input_ids"]
    require_chat_template(tokenizer)
    chats = [as_messages(prompt) for prompt in prompts]
    # return_dict=False: since transformers 5 the default is a BatchEncoding, not a list.
    encoded: Any = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return encoded


def _encode_one(offset: int, prompt: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    try:
        return _encode([prompt], tokenizer)[0]
    except ModelError:
        raise
    except Exception as error:  # whatever the template raised is about this prompt
        raise PromptError(offset, f"the chat template refused it: {type(error).__name__}: {error}") from error


def _describe(value: Any) -> str:
    if value is None:
        return "null"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
