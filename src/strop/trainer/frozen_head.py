"""The warning of an output layer under which LoRA adapters cannot learn."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from strop.data.hub import local_model
from strop.errors import StropError
from strop.models.frozen_head import frozen_head

logger = logging.getLogger(__name__)

_TOKENS, _ENOUGH = 256, 0.9
"""Tokens of prompts and answers that are looked at; a probability that a trained layer can give them."""


def warn_of_frozen_head(key: str, model: Any, tokenizer: Any, dataset: Any, data: Any) -> None:
    """Warn if adapters on the language model of a section cannot make the first tokens likely.

    ``dataset`` has the rows that it learns from, ``data`` is the section of that name.
    """
    if not model.lora_rank or model.lora_adapter_path is not None:
        return
    try:
        found = frozen_head(
            local_model(model.path, data.cache_dir),
            first_tokens(dataset, tokenizer),
            model.modules_to_save,
            trust_remote_code=model.trust_remote_code,
            override_config=model.override_config,
        )
    except StropError:
        return  # loading the model reports it
    if found is not None and found[0] < _ENOUGH:
        logger.warning(
            "warning: %s.lora_rank=%d: under the frozen norm and output layer of %s.path=%s no hidden state "
            "gives the tokens of the data a probability of much more than %.2f (the median), so adapters "
            "alone cannot learn; train that layer whole: %s.modules_to_save=[%s]",
            key,
            model.lora_rank,
            key,
            model.path,
            found[0],
            key,
            found[1],
        )


def first_tokens(dataset: Any, tokenizer: Any) -> list[int]:
    """Return tokens of the first rows, as many of prompts as of answers where there are answers."""
    prompts, answers = list[int](), list[int]()
    for number in range(min(len(dataset), _TOKENS)):
        row = dataset[number]
        prompts += map(int, row["input_ids"])
        answers += _answer(row, tokenizer)
        if len(prompts) >= _TOKENS and len(answers) >= _TOKENS:
            break
    answers = answers[: _TOKENS // 2]
    return prompts[: _TOKENS - len(answers)] + answers


def _answer(row: Mapping[str, Any], tokenizer: Any) -> Iterable[int]:
    """Return the ids of a row's given answer, or of its ground truth where that is a text."""
    for name in ("response", "chosen"):
        if name in row:
            return map(int, row[name])
    rewards = row.get("reward_model")
    truth = rewards.get("ground_truth") if isinstance(rewards, Mapping) else None
    return tokenizer.encode(truth, add_special_tokens=False) if isinstance(truth, str) else ()
