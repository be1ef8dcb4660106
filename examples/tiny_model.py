"""A tiny randomly initialised language model with a character tokenizer; nothing is downloaded.

The model is a Qwen2 (rotary positions, SwiGLU, tied embeddings) in the Hugging Face format, so it takes the
same code paths as a large one.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CHARACTERS = "0123456789+-*= "
SPECIAL = ("<pad>", "<end>", "<user>", "<assistant>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if message.role == 'assistant' %}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def build_tokenizer(characters: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per character, an end token and one token per chat role."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=["<user>", "<assistant>"],
        padding_side="left",
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(
    tokenizer: PreTrainedTokenizerFast, *, hidden: int = 64, layers: int = 2, heads: int = 2, seed: int = 0
) -> Qwen2ForCausalLM:
    """Build a randomly initialised Qwen2."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            initializer_range=0.1,  # a small model learns faster than with the usual 0.02
            max_position_embeddings=256,
            tie_word_embeddings=True,
            bos_token_id=None,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def save(folder: str | Path, **size: int) -> Path:
    """Save a model and its tokenizer as a Hugging Face folder; return ``folder``."""
    folder = Path(folder)
    tokenizer = build_tokenizer()
    build_model(tokenizer, **size).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
