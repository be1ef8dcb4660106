"""The warning of an output layer under which LoRA adapters cannot learn."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import torch

from strop.data.hub import local_tokenizer
from strop.errors import ModelError

logger = logging.getLogger(__name__)

_TOKENS, _ENOUGH = 256, 0.9
"""Tokens of prompts and answers that are looked at; a probability that a trained layer can give them."""


def warn_of_frozen_head(key: str, model: Any, tokenizer: Any, dataset: Any, data: Any) -> None:
    """Warn if adapters on the language model of section ``key`` cannot make the first tokens likely.

    ``dataset`` has the rows that it learns from, ``data`` is the section of that name.
    """
    if not model.lora_rank or model.lora_adapter_path is not None:
        return
    from strop.models.frozen_head import frozen_head

    try:
        found = frozen_head(
            # with the weights, where they are on this machine: on Ray only the workers need them
            local_tokenizer(model.path, data.cache_dir),
            first_tokens(dataset, tokenizer),
            model.modules_to_save,
            trust_remote_code=model.trust_remote_code,
            override_config=model.override_config,
        )
    except ModelError:  # the worker has other ways to load a model, and reports what is wrong
        return
    if found is not None and found[0] < _ENOUGH:
        logger.warning(
            f"warning: {key}.lora_rank={model.lora_rank}: under the frozen norm and output layer of "
            f"{key}.path={model.path} no hidden state gives the tokens of the data a probability of much "
            f"more than {found[0]:.2f} (the median), so adapters alone cannot learn; train that layer whole: "
            f"{key}.modules_to_save=[{found[1]}]"
        )


def first_tokens(dataset: Any, tokenizer: Any) -> list[int]:
    """Return tokens of the first rows, as many of prompts as of answers where there are answers."""
    rows = [dataset[row] for row in range(min(len(dataset), _TOKENS))]
    answers = [*islice((token for row in rows for token in _answer(row, tokenizer)), _TOKENS // 2)]
    prompts = (int(token) for row in rows for token in row.get("input_ids", ()))
    return [*islice(prompts, _TOKENS - len(answers)), *answers]


def _answer(row: Mapping[str, Any], tokenizer: Any) -> Iterable[int]:
    """Return the ids of a row's given answer, or of its ground truth where that is a text."""
    given, rewards = row.get("response", row.get("chosen")), row.get("reward_model")
    if torch.is_tensor(given):  # a file of prompts may have text under these names
        return given.tolist()
    truth = rewards.get("ground_truth") if isinstance(rewards, Mapping) else None
    return tokenizer.encode(truth, add_special_tokens=False) if isinstance(truth, str) else ()
