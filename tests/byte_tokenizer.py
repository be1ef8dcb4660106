"""A tokenizer of bytes with a few words, small enough to write ids by hand, and two chat templates for it.

Special words have the ids 1 to 12, byte b has id 32 + b, and words of two characters 300 to 304: "12" is one
id, and a policy that samples "1" and "2" as two ids sampled other tokens.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = [
    "<s>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>",
    "<tool_response>", "</tool_response>", "<|end|>", "<|user|>", "<|observation|>",
]  # fmt: skip
MERGED = ["\n\n", "12", "ok", '{"', "42"]
STOP = 3
"""Id of <|im_end|>."""

_CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + ({'name': c.function.name, 'arguments': "
    "c.function.arguments} | tojson) + '</tool_call>' }}{% endfor %}"
)
_TOOLS = "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
_ANSWER = (
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user\n' }}{% endif %}"
    "{{ '<tool_response>' + m.content + '</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}"
    "{% else %}{{ '\n' }}{% endif %}"
)
_OTHERS = "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
CHATML = (
    _TOOLS + "{% for m in messages %}" + _ANSWER
    + "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' + (m.content or '') }}" + _CALLS
    + "{{ '<|im_end|>\n' }}" + _OTHERS
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)  # fmt: skip
"""Append-only; answers of tools that follow one another are one turn of the user."""
TEXT_ARGUMENTS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ '<|observation|>' + m.content }}"
    "{% elif m.role == 'assistant' %}{{ '<|im_start|>' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function.name + '\n' + c.function.arguments + "
    "'</tool_call>' }}{% endfor %}{{ '<|end|>' }}"
    "{% else %}{{ '<|user|>' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
)
"""Joins the arguments of a call as text: a mapping is a TypeError."""


def byte_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """Return the tokenizer; <|im_end|> ends a turn."""
    # the characters that stand for bytes in byte-level tokenizers, in the order of the bytes
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    vocabulary = {f"<unused {number}>": number for number in range(300)}
    vocabulary = {name: number for name, number in vocabulary.items() if not 0 < number <= len(SPECIAL)}
    vocabulary = {name: number for name, number in vocabulary.items() if not 32 <= number < 288}
    vocabulary |= {name: number for number, name in enumerate(SPECIAL, 1)}
    vocabulary |= {letters[byte]: 32 + byte for byte in range(256)}
    pairs = [tuple(letters[byte] for byte in text.encode()) for text in MERGED]
    vocabulary |= {"".join(pair): 300 + number for number, pair in enumerate(pairs)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, padding_side="left", eos_token="<|im_end|>", pad_token="<s>"
    )
    fast.chat_template = template
    return fast
