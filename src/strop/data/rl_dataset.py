"""RLHFDataset: parquet rows with tokenized prompts, the data set of the reference documents."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from strop.data.loader import RowDataset
from strop.data.parquet import (
    UNNAMED_SOURCE,
    Files,
    check_columns,
    no_sources,
    read_prompt_table,
    require_ground_truths,
    sources_of,
)
from strop.data.prompts import as_messages, encode_raw
from strop.data.tokenize import tokenize_table
from strop.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger("strop.data")


TRUNCATIONS = ("error", "left", "right", "middle")


class RLHFDataset:
    """Prompts for reinforcement learning, read into memory and tokenized at construction.

    ``dataset[i]`` is a dict: ``input_ids`` (int64 tensor [length], unpadded, at most
    ``max_prompt_length``), ``data_source`` (the column ``reward_fn_key``), ``index``
    (``extra_info["index"]``, else the row's number), every other column of the files as plain Python
    values, and on request ``raw_prompt`` (chat messages; a plain string becomes one user message) and
    ``raw_prompt_ids`` (list of ints: the text alone, without chat template and special tokens).

    Prompts over ``max_prompt_length`` tokens are dropped with a warning that gives their number, or, with
    ``filter_overlong_prompts=False``, handled by ``truncation``: ``error``, or keep the last tokens
    (``left``), the first (``right``), or the first half and the last (``middle``).

    ``cache_dir`` holds downloads and token ids; None: ids are not cached and downloads go to
    ``~/.cache/strop``.

    Raises :class:`DataError` for unusable files, rows and prompts (see :mod:`strop.data.parquet`), and when
    no prompt is left.
    """

    def __init__(
        self,
        files: Files,
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_key: str = "prompt",
        max_prompt_length: int,
        truncation: str = "error",
        filter_overlong_prompts: bool = True,
        return_raw_chat: bool = False,
        return_raw_input_ids: bool = False,
        reward_fn_key: str = "data_source",
        num_workers: int | None = None,
        cache_dir: str | Path | None = None,
    ) -> None:
        if truncation not in TRUNCATIONS:
            raise DataError(f"data.truncation={truncation!r}: expected one of {', '.join(TRUNCATIONS)}")
        self.tokenizer, self.prompt_key, self.reward_fn_key = tokenizer, prompt_key, reward_fn_key
        self.max_prompt_length, self.truncation = max_prompt_length, truncation
        self.return_raw_chat, self.return_raw_input_ids = return_raw_chat, return_raw_input_ids
        self._table = read_prompt_table(files, prompt_key=prompt_key, cache_dir=cache_dir)
        check_columns(self._table, prompt_key, reward_fn_key)
        self._tokens = tokenize_table(
            self._table, tokenizer, prompt_key=prompt_key, num_workers=num_workers, cache_dir=cache_dir
        )
        self._rows = self._usable_rows(filter_overlong_prompts)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, item: int) -> dict[str, Any]:
        row_number = int(self._rows[item])
        fields = self._table.row(row_number)
        prompt = fields.pop(self.prompt_key)
        ids = truncate(self._tokens[row_number], self.max_prompt_length, self.truncation)
        fields["input_ids"] = torch.from_numpy(ids.astype(np.int64))
        fields["data_source"] = fields.setdefault(self.reward_fn_key, UNNAMED_SOURCE)
        fields["index"] = _row_index(fields, row_number)
        if self.return_raw_chat:
            fields["raw_prompt"] = as_messages(prompt)
        if self.return_raw_input_ids:
            fields["raw_prompt_ids"] = encode_raw(prompt, self.tokenizer)
        return fields

    def data_sources(self) -> set[str]:
        """The values of the column that says how a row is scored."""
        return sources_of(self._table, self.reward_fn_key)

    def no_sources(self) -> DataError:
        """The error for files without that column, where it is needed."""
        return no_sources(self._table, self.reward_fn_key)

    def require_ground_truths(self, sources: Collection[str], *, by_model: bool) -> None:
        """See :func:`strop.data.parquet.require_ground_truths`."""
        require_ground_truths(self._table, self.reward_fn_key, sources, by_model=by_model)

    def _usable_rows(self, filter_overlong: bool) -> np.ndarray:
        """Numbers of the rows to serve, int64; applies the filter or the rule ``truncation="error"``."""
        limit, lengths = self.max_prompt_length, self._tokens.lengths
        overlong = np.flatnonzero(lengths > limit)
        if not filter_overlong:
            if self.truncation == "error" and len(overlong):
                row = int(overlong[0])
                raise self._table.error(
                    row,
                    self.prompt_key,
                    f"the prompt has {lengths[row]} tokens, data.max_prompt_length is {limit} "
                    f"({len(overlong)} of {len(lengths)} prompts are too long): raise the limit, or set "
                    "data.truncation or data.filter_overlong_prompts",
                )
            return np.arange(len(lengths))
        kept = np.flatnonzero(lengths <= limit)
        if len(kept) == 0:
            raise DataError(
                f"{', '.join(self._table.files)}: all {len(lengths)} prompts are longer than "
                f"data.max_prompt_length={limit} (the shortest has {lengths.min()} tokens)"
            )
        if len(overlong):
            logger.warning(
                "%s: dropped %d of %d prompts, longer than data.max_prompt_length=%d tokens",
                ", ".join(self._table.files), len(overlong), len(lengths), limit,
            )  # fmt: skip
        return kept


def create_rl_dataset(
    files: Files, data_config: Any, tokenizer: PreTrainedTokenizerBase, processor: Any = None
) -> RLHFDataset:
    """The data set that ``config.data`` describes. ``processor`` (images, video) must be None."""
    if processor is not None:
        raise DataError(
            f"create_rl_dataset: a processor ({type(processor).__name__}) was given, but only "
            "text is supported; pass None"
        )
    return RLHFDataset(
        files,
        tokenizer,
        prompt_key=data_config.prompt_key,
        max_prompt_length=data_config.max_prompt_length,
        truncation=data_config.truncation,
        filter_overlong_prompts=data_config.filter_overlong_prompts,
        return_raw_chat=data_config.return_raw_chat,
        return_raw_input_ids=data_config.return_raw_input_ids,
        reward_fn_key=data_config.reward_fn_key,
        num_workers=data_config.num_workers,
        cache_dir=data_config.cache_dir,
    )


def truncate(ids: np.ndarray, limit: int, side: str) -> np.ndarray:
    """At most ``limit`` ids, cut on the named side; ``middle`` keeps the first limit // 2 and the end."""
    if len(ids) <= limit:
        return ids
    if side == "left":
        return ids[-limit:]
    if side == "right":
        return ids[:limit]
    head = limit // 2
    return np.concatenate([ids[:head], ids[len(ids) - (limit - head) :]])


def _row_index(fields: dict[str, Any], row_number: int) -> Any:
    extra_info = fields.get("extra_info")
    if isinstance(extra_info, dict) and extra_info.get("index") is not None:
        return extra_info["index"]
    return fields.get("index", row_number)


# Parts of a data set.


class FirstRows:
    """The first ``limit`` rows of ``dataset``, or all where there are fewer."""

    def __init__(self, dataset: RowDataset, limit: int) -> None:
        self.dataset = dataset
        self._length = min(limit, len(dataset))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.dataset[row]

    def data_sources(self) -> set[str]:
        """Those of ``dataset``."""
        return self.dataset.data_sources()


class FirstOfEachSource:
    """The first ``limit`` rows of every data source, in the order of ``dataset``."""

    def __init__(self, dataset: RowDataset, limit: int) -> None:
        self.dataset = dataset
        self._rows: list[int] = []
        taken: Counter[str] = Counter()
        for row in range(len(dataset)):
            source = dataset[row]["data_source"]
            taken[source] += 1
            if taken[source] <= limit:
                self._rows.append(row)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.dataset[self._rows[row]]

    def data_sources(self) -> set[str]:
        """Those of ``dataset``."""
        return self.dataset.data_sources()


def all_rows(dataset: RowDataset) -> RowDataset:
    """The data set that ``dataset`` is a part of, or ``dataset`` itself."""
    while isinstance(dataset, FirstRows | FirstOfEachSource):
        dataset = dataset.dataset
    return dataset
