"""Tokenizers built as those of known families, on a small vocabulary, with short forms of their templates."""

from __future__ import annotations

import json

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

_TEXT = [
    "You are a helpful assistant. What is 12 + 30? The user asks a question, and it is answered.\n\n",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))  # it's three, isn't it\n",
    "Ärger im Straßenverkehr; 你好，世界。 <tag name=\"value\"> {'role': 'user'} im_start im_end | a|b\n",
    "<think>\nfirst, add\n</think>\n\nThe answer is \\boxed{42}. user assistant system tool model INST\n",
]
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
)


def _fast(tokenizer: Tokenizer, template: str, **tokens: str) -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **tokens)
    fast.chat_template = template
    return fast


def _byte_level(special: list[str], ordinary: list[str], *, ignore_merges: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_TEXT, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ordinary])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def _sentence_piece(special: list[AddedToken], *, prefix: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    replace = normalizers.Replace(" ", "▁")
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", *byte_tokens], show_progress=False)
    tokenizer.normalizer = replace
    tokenizer.train_from_iterator(_TEXT, trainer)
    trained = json.loads(tokenizer.to_str())
    trained["added_tokens"] = trained["added_tokens"][:1]  # bytes are pieces of the model alone
    tokenizer = Tokenizer.from_str(json.dumps(trained))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix == "always":  # as in Llama 2's first files: every part between special tokens gets a space
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
    elif prefix == "first":
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(special)
    return tokenizer


QWEN2 = (
    "{%- if messages[0]['role'] != 'system' %}"
    "{{- '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{%- endif %}{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
QWEN3 = (
    "{%- set ns = namespace(last=messages|length - 1, seek=true) %}"
    "{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
    "{%- if ns.seek and message.role == 'user' and not (message.content.startswith('<tool_response>') and "
    "message.content.endswith('</tool_response>')) %}{%- set ns.seek = false %}{%- set ns.last = index %}"
    "{%- endif %}{%- endfor %}{%- for message in messages %}{%- set content = message.content %}"
    "{%- if message.role == 'assistant' %}{%- set reasoning = '' %}{%- if '</think>' in content %}"
    "{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last and (loop.last or reasoning) %}"
    "{{- '<|im_start|>assistant\n<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}"
    "{{- content.lstrip('\n') }}"
    "{%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}{{- '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
LLAMA3 = (
    "{{- bos_token }}{%- for message in messages %}{{- '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] | trim + eos_token }}{% else %}"
    "{{ '[INST] ' + message['content'] + '[/INST]' }}{% endif %}{% endfor %}"
)
PHI3 = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def _special(*names: str, **flags: bool) -> list[AddedToken]:
    return [AddedToken(name, special=True, **{"normalized": False, **flags}) for name in names]


def qwen2() -> PreTrainedTokenizerFast:
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = _byte_level(names, ["<|fim_prefix|>", "<tool_call>", "</tool_call>"])
    tokenizer.normalizer = normalizers.NFC()
    return _fast(tokenizer, QWEN2, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def qwen3() -> PreTrainedTokenizerFast:
    tokenizer = _byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ["<think>", "</think>"])
    tokenizer.normalizer = normalizers.NFC()
    return _fast(tokenizer, QWEN3, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def llama3() -> PreTrainedTokenizerFast:
    names = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
    tokenizer = _byte_level(names, [], ignore_merges=True)
    bos = ("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", pair="<|begin_of_text|> $A $B", special_tokens=[bos]
    )
    return _fast(tokenizer, LLAMA3, bos_token=bos[0], eos_token="<|eot_id|>", pad_token="<|eot_id|>")


def gemma() -> PreTrainedTokenizerFast:
    special = _special("<bos>", "<eos>", "<pad>", "<start_of_turn>", "<end_of_turn>")
    tokenizer = _sentence_piece(special, prefix="never")
    return _fast(tokenizer, GEMMA, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def mistral() -> PreTrainedTokenizerFast:
    tokenizer = _sentence_piece(_special("<s>", "</s>", "[INST]", "[/INST]"), prefix="first")
    return _fast(tokenizer, MISTRAL, bos_token="<s>", eos_token="</s>", pad_token="</s>", unk_token="<unk>")


def phi3() -> PreTrainedTokenizerFast:
    names = ("<|user|>", "<|system|>", "<|assistant|>", "<|end|>", "<|endoftext|>")
    tokenizer = _sentence_piece(_special(*names, rstrip=True), prefix="always")
    return _fast(tokenizer, PHI3, eos_token="<|end|>", pad_token="<|endoftext|>", unk_token="<unk>")


def normalized_special() -> PreTrainedTokenizerFast:
    """Special tokens that are searched for in the normalized text, as in files converted long ago."""
    tokenizer = _sentence_piece(_special("<s>", "</s>", "[INST]", "[/INST]", normalized=True), prefix="never")
    return _fast(tokenizer, MISTRAL, bos_token="<s>", eos_token="</s>", pad_token="</s>", unk_token="<unk>")


def unigram() -> PreTrainedTokenizerFast:
    """A vocabulary in which the special tokens are pieces of the model itself."""
    names = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=names, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return _fast(tokenizer, QWEN2, bos_token="<s>", eos_token="</s>", pad_token="</s>", unk_token="<unk>")


FAMILIES = (qwen2, qwen3, llama3, gemma, mistral, phi3, normalized_special, unigram)
