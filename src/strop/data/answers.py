"""Prompts with given answers (a response to learn, or a chosen and a rejected one), and their batches.

Batches have the layout of rollouts, which every model's forward pass understands.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from strop.algorithms.preference import REFERENCE_INPUTS
from strop.data.bridge import Bridge
from strop.data.control_tokens import control_tokens
from strop.data.loader import collate
from strop.data.pictures.rows import check_first, pictures_of
from strop.data.prompt_table import Files, read_prompt_table, source_of
from strop.data.prompts import (
    AUTO,
    PromptFormat,
    ResponseEncoder,
    control_tokens_around_answers,
    second_tag,
    texts_before_answers,
    thinking_before_answers,
)
from strop.data.rl_dataset import TokenLengths, prompts_in_words, truncate, usable_rows
from strop.data.tokenize import tokenize_table
from strop.errors import DataError
from strop.protocol import DataProto, sequence_columns

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)


class AnsweredDataset:
    """Prompts with one or more answers each, read into memory and tokenized at construction.

    ``dataset[i]`` is a dict: ``input_ids`` (the prompt, int64 [length], the same tokens as from
    ``RLHFDataset``), one entry [length] per answer with its end token last, ``data_source``, and the entries
    of ``columns``. The end of an answer to a chat is the one of ``end_ids`` that the chat template writes
    after a turn, else the tokenizer's; with ``how.allow_special_tokens`` an answer that has an end gets no
    second one. Control tokens that the template writes around an answer, as for gpt-oss, are a part of it.
    Where the template ends prompts with ``<think>``, an answer that begins with it loses the tag. An answer
    that is True in a column ``<name>_truncated`` of the files, for example ``chosen_truncated``, was cut when
    it was generated, and gets no end token; of a single answer also ``truncated``, as samples of strop have
    it. A row with an empty answer, which would teach to stop at once, is dropped with a warning.

    Prompts may have pictures, as those of ``RLHFDataset``, and answers none.

    Rows whose prompt or answer exceeds its limit are handled by ``truncation``: ``error``, or cut the prompt
    (``left``, ``right``, ``middle``: see ``RLHFDataset``). A cut answer is its first tokens, without the end
    token, like a response that reaches the length limit. With ``filter_overlong`` such rows are dropped with
    a warning.

    Raises :class:`DataError` for unusable files and rows, when no row is left, and if both answers
    are the same in every row.
    """

    def __init__(
        self,
        files: Files,
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_key: str,
        answer_keys: Mapping[str, str],
        tools_key: str | None = "tools",
        max_prompt_length: int,
        max_response_length: int,
        truncation: str = "error",
        filter_overlong: bool = False,
        how: PromptFormat = AUTO,
        end_ids: Sequence[int] = (),
        num_workers: int | None = None,
        cache_dir: str | Path | None = None,
        image_key: str | None = "auto",
        **pictures: Any,
    ) -> None:
        """Read and tokenize; ``answer_keys`` maps names in the rows to columns of the files.

        The names are ``response``, or ``chosen`` and ``rejected``. ``tools_key`` and ``image_key`` are those
        of ``RLHFDataset``, ``pictures`` are further options of ``pictures_of``. ``end_ids`` are the tokens
        that end a response of the model besides the tokenizer's.

        ``how`` is the treatment of prompts before they are tokenized, ``prompts_in_words`` describes it.
        """
        self.max_prompt_length, self.max_response_length = max_prompt_length, max_response_length
        self.truncation = truncation
        self._table = read_prompt_table(
            files,
            prompt_key=prompt_key,
            answer_keys=answer_keys,
            tools_key=tools_key,
            image_key=image_key,
            cache_dir=cache_dir,
        )
        self._columns = {"input_ids": prompt_key, **answer_keys}
        self.prompts_in_words = prompts_in_words(self._table, prompt_key, tokenizer, how)
        self.pictures = pictures_of(
            self._table,
            tokenizer,
            prompt_key=prompt_key,
            truncation=truncation,
            filter_key="data.filter_overlong",
            **pictures,
        )
        is_chat = how.is_chat(tokenizer, is_text=self._table.has_texts(prompt_key))
        ends = list(dict.fromkeys([tokenizer.eos_token_id, *end_ids]))
        written: Sequence[str] = ()
        if how.allow_special_tokens:  # without an end token the encoder says so
            written = tokenizer.convert_ids_to_tokens([end for end in ends if end is not None])
        thinking = thinking_before_answers(tokenizer, how) if is_chat else ""
        thinks_N = ~self._table.ending_with("assistant", prompt_key) & bool(thinking)
        if thinks_N.any():
            for column in answer_keys.values():
                self._table = self._table.without(second_tag(thinking), column, thinks_N)
        before = texts_before_answers(tokenizer, how, is_chat=is_chat)
        encode = ResponseEncoder(before, tuple(written))
        options: dict[str, Any] = {"how": how, "num_workers": num_workers, "cache_dir": cache_dir}
        own: dict[str, Any] = {"prompt_key": prompt_key, "pictures": self.pictures, **options}
        self._tokens = {
            "input_ids": tokenize_table(self._table, tokenizer, **own),
            **{
                name: tokenize_table(self._table, tokenizer, prompt_key=column, encode=encode, **options)
                for name, column in answer_keys.items()
            },
        }
        end = ends[0]
        if is_chat:
            with contextlib.suppress(Exception):  # templates raise anything, and some write no end
                end = Bridge(tokenizer, ends, how).stop_id
        if end != ends[0]:
            names = tokenizer.convert_ids_to_tokens([end, ends[0]])
            logger.info("answers end with %s, as turns in the chat template, not with %s", *names)
        end_text = str(tokenizer.convert_ids_to_tokens([end])[0])
        around = control_tokens_around_answers(tokenizer, how, end_text) if is_chat else ([], [])
        if any(around):
            texts = tokenizer.decode(around[0]), tokenizer.decode(around[1])
            logger.info("answers stand between %r and %r, as in the chat template", *texts)
        for name in answer_keys:
            tokens = self._tokens[name].with_last(end)
            cut = self._are_cut(f"{name}_truncated", *(["truncated"] if len(answer_keys) == 1 else []))
            if thinks_N.any():
                self._warn_of_thinking(answer_keys[name], thinks_N & ~cut)
            if how.allow_special_tokens:  # an answer that was rendered beforehand has its end already
                cut = cut | np.isin(tokens.before_last(), ends)
            tokens = tokens.without_last(cut)
            if any(around):
                continued = self._table.ending_with("assistant", prompt_key)
                # one that was rendered beforehand has its own, perhaps of another channel
                is_rendered = np.isin(tokens.first(), control_tokens(tokenizer).ids)
                tokens = tokens.framed(*around, ~continued & ~is_rendered, cut)
            self._tokens[name] = tokens
        if len(answer_keys) > 1:
            self._require_differing(*answer_keys.values())
        self._sources = [source_of(self._table.locate(row)[0]) for row in range(len(self._table))]
        if "data_source" in self._table.names:
            self._sources = [str(source) for source in self._table.table.column("data_source").to_pylist()]
        self.columns: dict[str, Tensor] = {}
        """Further columns of the rows, one entry each, that were computed after they were read."""
        rows = usable_rows(
            self._table,
            {self._columns[name]: tokens for name, tokens in self._tokens.items()},
            {self._columns[name]: (self._limit_key(name), self._limit(name)) for name in self._tokens},
            truncation=truncation,
            filter_overlong=filter_overlong,
            filter_key="data.filter_overlong",
        )
        self._rows = self._with_answers(rows, list(answer_keys.values()))
        if self.pictures is not None:
            check_first(self.pictures, self._table, self._sources)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = int(self._rows[item])
        fields: dict[str, Any] = {"data_source": self._sources[row]}
        if self.pictures is not None:
            fields["images"] = torch.from_numpy(self.pictures.columns[row])
        for name, tokens in self._tokens.items():
            # an answer is cut as a rollout cuts it: its first tokens stay
            side = self.truncation if name == "input_ids" else "right"
            ids = truncate(tokens[row], self._limit(name), side)
            fields[name] = torch.from_numpy(ids.astype(np.int64))
        # by item: these columns have an entry for each row that is served, not for each of the files
        return fields | {name: column[item] for name, column in self.columns.items()}

    def data_sources(self) -> set[str]:
        """Return the distinct values of the column ``data_source``."""
        return set(self._sources)

    def _are_cut(self, *columns: str) -> np.ndarray:
        """Return True, bool [N], for rows that the first of the ``columns`` that is there marks as cut."""
        column = next((name for name in columns if name in self._table.names), None)
        files = ", ".join(self._table.files)
        nowhere = np.zeros(len(self._table), dtype=bool)
        if column is None:
            return nowhere
        values = self._table.table.column(column)
        if pa.types.is_null(values.type):
            return nowhere
        if not pa.types.is_boolean(values.type):
            raise DataError(
                f"{files}: column {column!r} (answers that were cut): expected True or False, found "
                f"{values.type}; rename it if it says something else"
            )
        cut = values.fill_null(False).to_numpy()
        logger.info("%s: %s: %d of %d answers get no end token", files, column, cut.sum(), len(cut))
        return cut

    def _with_answers(self, rows: np.ndarray, columns: Sequence[str]) -> np.ndarray:
        """Return the ``rows`` that have a text in all ``columns``; warn of the others.

        Raises ``DataError`` for the first of them if no row is left.
        """
        found = {column: self._table.table.column(column).cast(pa.large_string()) for column in columns}
        texts = {column: pc.call_function("utf8_trim_whitespace", [found[column]]) for column in columns}
        empty = {
            column: pc.call_function("equal", [values, pa.scalar("", pa.large_string())]).to_numpy()
            for column, values in texts.items()
        }
        is_empty = np.logical_or.reduce(list(empty.values()))[rows]
        if not is_empty.any():
            return rows
        first, n_empty = int(rows[is_empty][0]), int(is_empty.sum())
        column = next(column for column, found in empty.items() if found[first])
        if n_empty == len(rows):
            raise self._table.error(first, column, f"found an empty answer, as in all {n_empty} rows")
        logger.warning(
            "%s: dropped %d of %d rows with an empty answer, which teach to stop at once; first %s, row %d, "
            "field %s",
            ", ".join(self._table.files), n_empty, len(rows), *self._table.locate(first), column,
        )  # fmt: skip
        return rows[~is_empty]

    def _warn_of_thinking(self, column: str, thinks_N: np.ndarray) -> None:
        """Warn of answers in rows ``thinks_N`` that stay in the think block at the end of their prompts."""
        texts, options = self._table.table.column(column), pc.MatchSubstringOptions("</think>")
        texts = texts.cast(pa.large_string()) if pa.types.is_dictionary(texts.type) else texts
        closed = pc.call_function("match_substring", [texts], options).to_numpy()
        if n_open := int((~closed & thinks_N).sum()):
            logger.warning(
                "%s: the chat template begins a think block after the prompt, and %d of %d answers of the "
                "column %s have no </think>, so they are learned as thinking; set "
                "data.apply_chat_template_kwargs={enable_thinking: False} if the template has it, or begin "
                "these answers with </think>",
                ", ".join(self._table.files),
                n_open,
                len(texts),
                column,
            )

    def _require_differing(self, chosen: str, rejected: str) -> None:
        """Raise ``DataError`` if both answers are the same in every row; warn if in some."""
        table, files = self._table.table, ", ".join(self._table.files)
        n_same = table.filter(pc.field(chosen) == pc.field(rejected)).num_rows
        if n_same == len(table):
            raise DataError(
                f"{files}: {chosen!r} (data.chosen_key) and {rejected!r} (data.rejected_key) are the same in "
                "every row, so there is no preference to learn"
            )
        if n_same:
            logger.warning(
                "%s: %r and %r are the same in %d of %d rows, which teach nothing",
                files,
                chosen,
                rejected,
                n_same,
                len(table),
            )

    def token_lengths(self) -> dict[str, TokenLengths]:
        """See ``MeasuredDataset``; an answer's length includes its end token."""
        own = None if self.pictures is None else self.pictures.tokens_of_rows()
        return {
            "prompt" if name == "input_ids" else name: TokenLengths(
                tokens.lengths, self._limit(name), self._limit_key(name), own if name == "input_ids" else None
            )
            for name, tokens in self._tokens.items()
        }

    def _limit(self, name: str) -> int:
        return self.max_prompt_length if name == "input_ids" else self.max_response_length

    def _limit_key(self, name: str) -> str:
        return f"data.max_{'prompt' if name == 'input_ids' else 'response'}_length"


Rows = Sequence[dict[str, Any]]


def response_batch(
    rows: Rows, *, pad_token_id: int, max_prompt_length: int, max_response_length: int
) -> DataProto:
    """Return each row's prompt with its ``response``.

    ``input_ids``, ``attention_mask``, ``position_ids`` int64 [B, L], prompts padded on the left and
    responses on the right; ``responses`` int64 [B, T], ``response_mask`` float32 [B, T]; ``images`` as
    ``collate``.
    """
    prompts = _prompts(rows, pad_token_id, max_prompt_length)
    responses, mask = _padded([row["response"] for row in rows], pad_token_id, max_response_length)
    return _joined(prompts, responses, mask, mask)


def pair_batch(
    rows: Rows, *, pad_token_id: int, max_prompt_length: int, max_response_length: int
) -> DataProto:
    """Return each row's prompt with its answers ``chosen`` and ``rejected``; a pair is one row.

    Like ``response_batch`` with the chosen answer, but ``attention_mask`` covers the longer of the two. The
    other answer is in ``rejected`` int64 [B, T] and ``rejected_mask`` float32 [B, T]. Of rows with the
    reference's log-probs, these are columns [B].
    """
    prompts = _prompts(rows, pad_token_id, max_prompt_length)
    chosen, chosen_mask = _padded([row["chosen"] for row in rows], pad_token_id, max_response_length)
    rejected, rejected_mask = _padded([row["rejected"] for row in rows], pad_token_id, max_response_length)
    batch = _joined(prompts, chosen, chosen_mask, torch.maximum(chosen_mask, rejected_mask))
    reference = {
        name: torch.stack([row[name] for row in rows]) for name in REFERENCE_INPUTS if name in rows[0]
    }
    return batch.union(DataProto({"rejected": rejected, "rejected_mask": rejected_mask, **reference}))


def _prompts(rows: Rows, pad_token_id: int, max_prompt_length: int) -> DataProto:
    names = [name for name in ("input_ids", "data_source", "images") if name in rows[0]]
    named = [{name: row[name] for name in names} for row in rows]
    return collate(named, pad_token_id=pad_token_id, max_prompt_length=max_prompt_length)


def _padded(answers: Sequence[Tensor], pad_token_id: int, width: int) -> tuple[Tensor, Tensor]:
    """Return ids int64 [B, width], padded on the right, and the mask float32 [B, width] of real tokens."""
    ids = torch.full((len(answers), width), pad_token_id, dtype=torch.int64)
    for row, answer in zip(ids, answers, strict=True):
        row[: len(answer)] = answer  # raises for an answer of more than width tokens
    lengths = torch.tensor([len(answer) for answer in answers])
    return ids, (torch.arange(width) < lengths[:, None]).float()


def _joined(prompts: DataProto, responses: Tensor, response_mask: Tensor, seen: Tensor) -> DataProto:
    """Append responses to prompts; ``seen`` [B, T] marks the response columns that a pass needs."""
    attention_mask = torch.cat([prompts.batch["attention_mask"], seen.long()], dim=1)
    return DataProto(
        {
            **sequence_columns(torch.cat([prompts.batch["input_ids"], responses], dim=1), attention_mask),
            "responses": responses,
            "response_mask": response_mask,
            **{name: column for name, column in prompts.batch.items() if name == "images"},
        },
        prompts.non_tensor_batch,
    )
