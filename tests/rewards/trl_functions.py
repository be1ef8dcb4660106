"""Reward functions as TRL calls them, and their values by TRL's own ``GRPOTrainer``.

    python tests/rewards/trl_functions.py > tests/rewards/trl_values.json

in an environment of ``benchmarks/requirements-trl.lock`` records the values (TRL 1.16.0).
"""

from __future__ import annotations

import json
from typing import Any

CHARACTERS = "0123456789+=-#% abcdefghijklmnopqrstuvwxyz"  # ids from 2 on, as the tokenizer of these tests
QUESTIONS = ["1+2=", "2+2=", "3-1=", "5+0="]
RESPONSES = ["3", "44", "", "5 apples"]
COLUMNS: dict[str, list[Any]] = {"answer": ["3", "4", None, "5"], "level": [1, 2, 2, 1]}
FUNCTIONS = {"reward": 1.0, "short": 0.5, "judged": 2.0}
"""Name -> weight."""


def reward(prompts, completions, answer, **kwargs):
    return [
        None
        if right is None
        else float(_text(response) == right)
        + len(_text(question)) / 8
        + ("+" in _text(question))
        + len(ids) / 100
        for question, response, right, ids in zip(
            prompts, completions, answer, kwargs["completion_ids"], strict=True
        )
    ]


def short(completions, **kwargs):
    return [
        None if level == 2 else -float(len(_text(one)))
        for one, level in zip(completions, kwargs["level"], strict=True)
    ]


async def judged(prompts, completions, level, **kwargs):
    import asyncio

    await asyncio.sleep(0)
    return [None if one == 2 else one / 3 for one in level]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else value[-1]["content"]


def ids_of(response: str) -> list[int]:
    """Token ids of a response, with the end token."""
    return [*(2 + CHARACTERS.index(character) for character in response), 1]


def messages(role: str, texts: list[str]) -> list[list[dict[str, str]]]:
    return [[{"role": role, "content": text}] for text in texts]


def record() -> dict[str, Any]:
    """Return the values [samples][functions] of texts and of chats, null for None, and TRL's version."""
    import tempfile

    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1} | {one: 2 + i for i, one in enumerate(CHARACTERS)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(words, merges=[])), pad_token="<pad>", eos_token="<eos>"
    )
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    values: dict[str, Any] = {"trl": trl.__version__}
    for name, prompts, completions in (
        ("text", QUESTIONS, RESPONSES),
        ("chat", messages("user", QUESTIONS), messages("assistant", RESPONSES)),
    ):
        rows = [
            {"prompt": prompt, **{column: of_it[row] for column, of_it in COLUMNS.items()}}
            for row, prompt in enumerate(prompts)
        ]
        with tempfile.TemporaryDirectory() as folder:
            options = {"use_cpu": True, "report_to": [], "bf16": False}
            trainer = trl.GRPOTrainer(
                model=LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **sizes)),
                processing_class=tokenizer,
                reward_funcs=[reward, short, judged],
                args=trl.GRPOConfig(output_dir=folder, per_device_train_batch_size=8, **options),
                train_dataset=Dataset.from_list(rows),
            )
            found = trainer._calculate_rewards(rows, prompts, completions, list(map(ids_of, RESPONSES)))
        values[name] = [[None if one != one else one for one in row] for row in found.tolist()]
    return values


if __name__ == "__main__":
    print(json.dumps(record(), indent=2))
