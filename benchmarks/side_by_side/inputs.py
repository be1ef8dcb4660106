"""Models and prompts on disk: random Qwen2s with a character tokenizer of the model's vocabulary size."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from side_by_side.setting import Setting

from rollout_hf import MODELS, build
from tiny_model import SPECIAL, build_tokenizer

SHORTEST, LONGEST = 32, 64
"""Tokens of a prompt, as in ``rollout_hf.py``."""
_TEMPLATE = 2
"""Prompt tokens that the chat template adds."""
_LETTERS = (
    *range(0x4E00, 0xD7A4),
    *range(0x20000, 0x40000),
)  # 166,308 code points, none in the chat template


def characters(vocabulary: int) -> str:
    """Return one character for every token that is not special."""
    return "".join(map(chr, _LETTERS[: vocabulary - len(SPECIAL)]))


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer with one token per character, and the config.json that strop requires.

    With ``"model_type": "qwen2"`` transformers would load it as Qwen2's tokenizer.
    """
    build_tokenizer(characters(vocabulary)).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')


def write_prompts(path: Path, *, vocabulary: int, count: int) -> Path:
    """Write one-message conversations of ``SHORTEST`` to ``LONGEST`` tokens; return ``path``."""
    stream, alphabet = random.Random(0), characters(vocabulary)
    rows = [
        {
            "data_source": "side_by_side",
            "prompt": [
                {
                    "role": "user",
                    "content": "".join(
                        stream.choices(alphabet, k=stream.randint(SHORTEST, LONGEST) - _TEMPLATE)
                    ),
                }
            ],
            "reward_model": {"style": "rule", "ground_truth": ""},
        }
        for _ in range(count)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_inputs(settings: Iterable[Setting]) -> None:
    """Write the inputs of all settings; a shared file has as many prompts as its largest user needs."""
    counts: dict[Path, int] = {}
    for setting in settings:
        vocabulary = MODELS[setting.model]["vocab_size"]
        if not setting.model_folder.exists():
            build(setting.model).save_pretrained(setting.model_folder)
            write_tokenizer(setting.tokenizer_folder, vocabulary)
        count = counts[setting.prompts] = max(setting.prompt_count, counts.get(setting.prompts, 0))
        write_prompts(setting.prompts, vocabulary=vocabulary, count=count)
