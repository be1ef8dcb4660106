"""A package as users name in ``external_lib``: registers a model family and a tokenizer with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import transformers
from transformers import AutoTokenizer, PreTrainedTokenizer, Qwen2Config


class LetterTokenizer(PreTrainedTokenizer):
    """One token per letter, by a table in ``letters.json``."""

    vocab_files_names: ClassVar = {"letters_file": "letters.json"}

    def __init__(self, letters_file, **options):
        self._ids = json.loads(Path(letters_file).read_text())
        self._letters = {number: letter for letter, number in self._ids.items()}
        super().__init__(**options)

    @property
    def vocab_size(self):
        return len(self._ids)

    def get_vocab(self):
        return dict(self._ids)

    def _tokenize(self, text, **options):
        return list(text)

    def _convert_token_to_id(self, token):
        return self._ids[token]

    def _convert_id_to_token(self, index):
        return self._letters[index]

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)

    def save_vocabulary(self, save_directory, filename_prefix=None):
        path = Path(save_directory) / "letters.json"
        path.write_text(json.dumps(self._ids))
        return (str(path),)


class LetterConfig(Qwen2Config):
    model_type = "letters"


class LetterModel(transformers.Qwen2Model):
    config_class = LetterConfig


class LetterForCausalLM(transformers.Qwen2ForCausalLM):
    config_class = LetterConfig


class LetterForSequenceClassification(transformers.Qwen2ForSequenceClassification):
    config_class = LetterConfig


transformers.AutoConfig.register(LetterConfig.model_type, LetterConfig)
transformers.AutoModel.register(LetterConfig, LetterModel)
transformers.AutoModelForCausalLM.register(LetterConfig, LetterForCausalLM)
transformers.AutoModelForSequenceClassification.register(LetterConfig, LetterForSequenceClassification)
AutoTokenizer.register(LetterConfig, LetterTokenizer)
