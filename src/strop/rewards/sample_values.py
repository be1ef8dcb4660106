"""The values of samples that reward functions take by name, from batches of prompts."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from strop.errors import RewardError
from strop.protocol import DataProto
from strop.rewards.arguments import Function, Row, named_values
from strop.rewards.scorer import Scorer

logger = logging.getLogger(__name__)

GROUND_TRUTHS = {"ground_truth", "ground_truths"}
"""Parameters that are the ground truth."""


def ground_truth_of(record: Mapping[str, Any] | None, column: Any) -> Any:
    """Return ``reward_model.ground_truth``, or the column ``ground_truth`` without it."""
    return record["ground_truth"] if record and "ground_truth" in record else column


def row_fields(prompts: DataProto, reward_fn_key: str) -> list[tuple[str, Any, Any]]:
    """Return data source, ground truth and extra info of each row."""
    columns = prompts.non_tensor_batch
    if reward_fn_key not in columns:
        raise RewardError(
            f"the data has no column {reward_fn_key!r} (data.reward_fn_key), which selects a row's "
            f"scorer; it has {sorted(columns)}"
        )
    nothing = np.full(len(prompts), None, dtype=object)
    return [
        (str(source), ground_truth_of(target, plain), extra)
        for source, target, plain, extra in zip(
            columns[reward_fn_key],
            columns.get("reward_model", nothing),
            columns.get("ground_truth", nothing),
            columns.get("extra_info", nothing),
            strict=True,
        )
    ]


class SampleValues:
    """``Sample.named`` of the samples of a batch of prompts, as the functions of ``scorer`` take them."""

    def __init__(self, scorer: Scorer, tokenizer: Any, prompts: DataProto, prompt_key: str) -> None:
        self._scorer, self._tokenizer, self._prompts = scorer, tokenizer, prompts
        self._given = prompts.non_tensor_batch.get(prompt_key)
        self._columns = dict(prompts.non_tensor_batch)

    def of(
        self, prompt: int, token_ids: list[int], response: str, *, truncated: bool | None
    ) -> dict[str, Any]:
        """Return the values for a response to the prompt in row ``prompt``."""
        row = Row(
            columns={name: column[prompt] for name, column in self._columns.items()},
            given=None if self._given is None else self._given[prompt],
            ids=lambda: self._ids(prompt),
            text=lambda: self._tokenizer.decode(self._ids(prompt), skip_special_tokens=False),
        )
        return named_values(
            self._scorer.wanted,
            row,
            response,
            for_batches=self._scorer.is_batch,
            response_ids=token_ids,
            truncated=truncated,
        )

    def _ids(self, prompt: int) -> list[int]:
        tensors = self._prompts.batch
        name = next((name for name in ("prompts", "input_ids") if name in tensors), None)
        if name is None or "attention_mask" not in tensors:
            return []
        ids_P = tensors[name][prompt]
        return ids_P[tensors["attention_mask"][prompt, : len(ids_P)].bool()].tolist()


def warn_without_ground_truths(functions: Iterable[Function], rows: Iterable[Mapping[str, Any]]) -> None:
    """Warn if one of the functions names the ground truth, and no row has one."""
    taking = [function for function in functions if function.names & GROUND_TRUTHS]
    if not taking:
        return
    columns: set[str] = set()
    for row in rows:
        columns |= row.keys()
        if ground_truth_of(row.get("reward_model"), row.get("ground_truth")) is not None:
            return
    found = ", ".join(sorted(columns - {"input_ids", "index"}))
    logger.warning(
        "warning: %s gets ground_truth=None for every row: the data has neither "
        "reward_model.ground_truth nor a column ground_truth. Name the column with the answers "
        "(data.answer_key), or take it as a parameter of the function; the columns are %s",
        taking[0].where, found,
    )  # fmt: skip
