"""The values of samples that reward functions take by name, from batches of prompts."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strop.errors import RewardError
from strop.protocol import DataProto
from strop.rewards.arguments import BATCH_NAMES, SAMPLE_NAMES, Function, Row, named_values
from strop.rewards.scorer import Scorer
from strop.rewards.worker.records import Outcome

logger = logging.getLogger(__name__)

_GROUND_TRUTHS = {"ground_truth", "ground_truths"}
_OF_EVERY_ROW = ("index", "uid")  # columns that strop adds


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
    taking = [function for function in functions if function.names & _GROUND_TRUTHS]
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


@dataclass
class Example:
    """One row, scored with what may be its right answer as the response."""

    what: str
    """Where the response is from, in words."""
    response: str
    outcome: Outcome
    doubt: str = ""
    """A warning about the score."""

    def is_without_reward(self) -> bool:
        """Return True if the response has a score, of 0 or less."""
        return not self.outcome.error and self.outcome.score is not None and self.outcome.score <= 0


def doubt(examples: Sequence[Example], empty: Example, remarks: Iterable[str]) -> str:
    """Return a warning if none of the right answers in ``examples`` scores more than an empty response.

    ``remarks`` say why that may be.
    """
    lowest = empty.outcome.score
    scores = {
        example.what: example.outcome.score
        for example in examples
        if not example.outcome.error and example.outcome.score is not None
    }
    if empty.outcome.error or lowest is None or not scores or max(scores.values()) > lowest:
        return ""
    found = ", ".join(f"{what} scores {score:g}" for what, score in scores.items())
    reasons = [*remarks, "a function may expect more than the bare answer, such as a tag around it"]
    return (
        f"as the response, {found}, and an empty text {lowest:g}; expected more for a right answer: "
        + "; ".join(reasons)
    )


def example_answers(
    functions: Sequence[Function], prompts: DataProto, prompt_key: str, reward_fn_key: str
) -> tuple[list[tuple[str, str]], bool]:
    """Return what may be the right answer of a batch of one row, and True if the functions take it.

    Each is what it is in words, and its text; the likeliest is first.
    """
    ((_, ground_truth, _),) = row_fields(prompts, reward_fn_key)
    if ground_truth is None or not any(function.names & _GROUND_TRUTHS for function in functions):
        known = {*SAMPLE_NAMES, *BATCH_NAMES, *_OF_EVERY_ROW, prompt_key, reward_fn_key}
        columns = {name: column[0] for name, column in prompts.non_tensor_batch.items() if name not in known}
        named = {
            f"its column {name!r}": str(columns[name])
            for function in functions
            for name in function.ordered
            if isinstance(columns.get(name), str | int | float)
        }
        if named:
            return list(named.items()), True
        if ground_truth is None:
            return [
                ("an empty text (the row has no ground truth, and no column that the function names)", "")
            ], False
        return [("its ground truth", str(ground_truth))], False
    return [("its ground truth", str(ground_truth))], True
