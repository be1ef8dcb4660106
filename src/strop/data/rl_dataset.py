"""``RLHFDataset``: rows with tokenized prompts; the choice of usable rows; subsets of a data set."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from strop.config.load import as_config
from strop.data.loader import RowDataset
from strop.data.pictures.expand import PromptPictures
from strop.data.pictures.rows import check_first, pictures_of
from strop.data.prompt_table import (
    OWN_TOOLS,
    Files,
    PromptTable,
    check_columns,
    read_prompt_table,
    require_ground_truths,
    source_of,
    with_ground_truths,
)
from strop.data.prompts import AUTO, PromptFormat, encode_raw
from strop.data.tokenize import TokenizedPrompts, tokenize_table
from strop.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger("strop.data")

TRUNCATIONS = ("error", "left", "right", "middle")
_PROMPT_LIMIT = "data.max_prompt_length"


class TokenLengths(NamedTuple):
    """Token lengths of one column of a data set's files, before rows are dropped or cut."""

    lengths: np.ndarray
    """Tokens per row of the files, int64 [rows]."""
    limit: int
    """Most tokens of a row that is used whole."""
    key: str
    """The configuration key of ``limit``."""
    of_pictures: np.ndarray | None = None
    """Tokens per row that stand for pictures, int64 [rows]; None for rows of text."""


@runtime_checkable
class MeasuredDataset(Protocol):
    """A data set with token lengths."""

    def __len__(self) -> int: ...

    def token_lengths(self) -> dict[str, TokenLengths]:
        """Return the lengths by name of the column: ``prompt`` and those of its answers."""
        ...


class RLHFDataset:
    """Prompts for reinforcement learning, read into memory and tokenized at construction.

    ``dataset[i]`` is a dict: ``input_ids`` (int64 tensor [length], unpadded, at most ``max_prompt_length``),
    ``data_source`` (the column ``reward_fn_key``), ``index`` (``extra_info["index"]``, else the row's
    number), every column of the files as plain Python values, and optionally ``raw_prompt`` (chat
    messages; a plain string becomes one user message) with ``raw_tools`` of data with tools, and
    ``raw_prompt_ids`` (list of ints: the text alone, without chat template and special tokens).

    Prompts over ``max_prompt_length`` tokens are handled by ``truncation``: ``error``, or keep the last
    tokens (``left``), the first (``right``), or the first half and the last (``middle``). With
    ``filter_overlong_prompts`` they are dropped with a warning.

    ``answer_key`` names a column whose values become the ground truths, in a column ``reward_model``;
    ``data_source`` is that of files without the column ``reward_fn_key``. ``how`` is the treatment of
    prompts before they are tokenized, and ``prompts_in_words`` describes it in one line. ``tools_key`` names
    the column of tools; the chat template renders those of each row, or those that ``tools_of`` returns.

    ``image_key`` names the column of pictures, of which a row has at most ``max_images`` (None: any number).
    If a row has some, every row has ``images`` (int64 tensor [I], the digests of :mod:`strop.pictures` in the
    order of their places, 0 behind the last; I = ``max_images``, or the most of a row), and
    ``pictures`` has the ``processor``; of a folder, by default the tokenizer's, it is loaded with the bounds
    ``min_pixels`` and ``max_pixels``.

    ``cache_dir`` holds downloads and token ids; with None, ids are not cached and downloads go to
    ``~/.cache/strop``.

    Raises :class:`DataError` for unusable files, rows and prompts (see :mod:`strop.data.prompt_table`), and
    when no prompt is left.
    """

    def __init__(
        self,
        files: Files,
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_key: str = "prompt",
        max_prompt_length: int,
        truncation: str = "error",
        filter_overlong_prompts: bool = False,
        return_raw_chat: bool = False,
        return_raw_input_ids: bool = False,
        reward_fn_key: str = "data_source",
        answer_key: str | None = None,
        tools_key: str | None = "tools",
        data_source: str | None = None,
        how: PromptFormat = AUTO,
        num_workers: int | None = None,
        cache_dir: str | Path | None = None,
        tools_of: Callable[[Mapping[str, Any]], list[dict[str, Any]]] | None = None,
        processor: Any = None,
        image_key: str | None = "auto",
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        max_images: int | None = None,
    ) -> None:
        if truncation not in TRUNCATIONS:
            raise DataError(f"data.truncation={truncation!r}: expected one of {', '.join(TRUNCATIONS)}")
        self.tokenizer, self.prompt_key, self.reward_fn_key = tokenizer, prompt_key, reward_fn_key
        self.max_prompt_length, self.truncation = max_prompt_length, truncation
        self.return_raw_chat, self.return_raw_input_ids = return_raw_chat, return_raw_input_ids
        self.how = how
        self._table = read_prompt_table(
            files,
            prompt_key=prompt_key,
            answer_keys={"answer": answer_key} if answer_key else {},
            tools_key=tools_key,
            image_key=image_key,
            defaults={reward_fn_key: data_source} if data_source else {},
            cache_dir=cache_dir,
        )
        if answer_key:
            self._table = with_ground_truths(self._table, answer_key)
        if tools_of is not None:
            self._table = self._table.with_tools(tools_of)
        check_columns(self._table, prompt_key, reward_fn_key)
        self.prompts_in_words = prompts_in_words(self._table, prompt_key, tokenizer, how)
        self.pictures = pictures_of(
            self._table,
            tokenizer,
            prompt_key=prompt_key,
            truncation=truncation,
            filter_key="data.filter_overlong_prompts",
            processor=processor,
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            max_images=max_images,
        )
        self._tokens = tokenize_table(
            self._table,
            tokenizer,
            prompt_key=prompt_key,
            how=how,
            num_workers=num_workers,
            cache_dir=cache_dir,
            pictures=self.pictures,
        )
        self._rows = usable_rows(
            self._table,
            {prompt_key: self._tokens},
            {prompt_key: (_PROMPT_LIMIT, max_prompt_length)},
            truncation=truncation,
            filter_overlong=filter_overlong_prompts,
            filter_key="data.filter_overlong_prompts",
        )

        if self.pictures is not None:
            sources: list[Any] = [""] * len(self._table)
            if reward_fn_key in self._table.names:
                sources = self._table.table.column(reward_fn_key).to_pylist()
            check_first(self.pictures, self._table, sources)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, item: int) -> dict[str, Any]:
        columns = self.columns(item)
        # without pictures images may be a column of the user
        arrays = ("input_ids", "images") if self.pictures is not None else ("input_ids",)
        return {**columns, **{name: torch.from_numpy(columns[name]) for name in arrays}}

    def columns(self, item: int) -> dict[str, Any]:
        """Return a row with ``input_ids``, and ``images`` if there are some, as arrays."""
        row_number = int(self._rows[item])
        columns = self._table.row(row_number)
        prompt, own_tools = columns[self.prompt_key], columns.pop(OWN_TOOLS, None)
        # here, not in the cache of token ids, which serves every limit
        ids = truncate(self._tokens[row_number], self.max_prompt_length, self.truncation)
        columns["input_ids"] = ids.astype(np.int64)
        if self.pictures is not None:
            columns["images"] = self.pictures.columns[row_number]
        source = source_of(self._table.locate(row_number)[0])
        columns["data_source"] = columns.setdefault(self.reward_fn_key, source)
        index = (columns.get("extra_info") or {}).get("index")
        columns["index"] = columns.get("index", row_number) if index is None else index
        if self.return_raw_chat:
            columns["raw_prompt"] = self.how.messages(prompt)
            if self._table.tools_key is not None:
                columns["raw_tools"] = own_tools or columns.get(self._table.tools_key)
        if self.return_raw_input_ids:
            columns["raw_prompt_ids"] = encode_raw(prompt, self.tokenizer, self.how)
        return columns

    def data_sources(self, environment: str | None = None) -> set[str]:
        """Return the distinct values of the column that selects a row's scorer.

        ``environment``: of the rows whose column of this name has this value.
        """
        table = self._table.table
        if environment is not None:
            table = table.filter([value == environment for value in table.column("environment").to_pylist()])
        if self.reward_fn_key not in self._table.names:
            return set(map(source_of, self._table.files)) if len(table) else set()
        return set(table.column(self.reward_fn_key).unique().to_pylist())

    def has_rows_for_model(self) -> bool:
        """Return True if a row is for the reward model alone (``reward_model.style`` is "model")."""
        table = self._table.table
        kind = table.schema.field("reward_model").type if "reward_model" in table.column_names else None
        if kind is None or not pa.types.is_struct(kind) or kind.get_field_index("style") < 0:
            return False
        return bool(table.filter(pc.field("reward_model", "style").cast(pa.string()) == "model"))

    def token_lengths(self) -> dict[str, TokenLengths]:
        own = None if self.pictures is None else self.pictures.tokens_of_rows()
        return {"prompt": TokenLengths(self._tokens.lengths, self.max_prompt_length, _PROMPT_LIMIT, own)}

    def require_sources(self) -> None:
        """Raise ``DataError`` if the files have no column that selects a scorer."""
        if self.reward_fn_key not in self._table.names:
            raise DataError(
                "no reward: name your function with custom_reward_function.path=FILE.py, or a built-in "
                f"scorer with data.data_source (strop docs rewards); {', '.join(self._table.files)} has no "
                f"column {self.reward_fn_key!r} (data.reward_fn_key) to select one"
            )

    def require_ground_truths(self, sources: Collection[str], *, by_model: bool) -> None:
        """Raise as :func:`strop.data.prompt_table.require_ground_truths`."""
        require_ground_truths(self._table, self.reward_fn_key, sources, by_model=by_model)


def usable_rows(
    table: PromptTable,
    tokens: Mapping[str, TokenizedPrompts],
    limits: Mapping[str, tuple[str, int]],
    *,
    truncation: str,
    filter_overlong: bool,
    filter_key: str,
) -> np.ndarray:
    """Return the numbers of the rows to serve, int64.

    ``tokens`` and ``limits`` (configuration key, tokens) are by column. With ``filter_overlong``, of the key
    ``filter_key``, rows beyond a limit are dropped with a warning; otherwise all rows are served, unless
    ``truncation`` is ``error``.

    Raises :class:`DataError` for the first overlong row, or when no row is left.
    """
    fits = {column: found.lengths <= limits[column][1] for column, found in tokens.items()}
    kept = np.flatnonzero(np.logical_and.reduce(list(fits.values())))
    n_rows, n_overlong, files = len(table), len(table) - len(kept), ", ".join(table.files)
    longest: dict[str, int] = {}
    for column, fit in fits.items():
        if not fit.all():
            key = limits[column][0]
            longest[key] = max(longest.get(key, 0), int(tokens[column].lengths.max()))
    whole = " ".join(f"{key}={length}" for key, length in longest.items())
    if not filter_overlong:
        if truncation != "error" or not n_overlong:
            return np.arange(n_rows)
        row, column = min((int(np.argmin(fit)), column) for column, fit in fits.items() if not fit.all())
        key, limit = limits[column]
        raise table.error(
            row,
            column,
            f"{tokens[column].lengths[row]} tokens, {key} is {limit}; {n_overlong} of {n_rows} rows are too "
            f"long. Keep all with {whole}, the longest, or drop the {n_overlong} with {filter_key}=True "
            "(data.truncation cuts prompts)",
        )
    named = " or ".join(dict.fromkeys(f"{key}={limit}" for key, limit in limits.values()))
    if len(kept) == 0:
        shortest = min(int(found.lengths.min()) for found in tokens.values())
        raise DataError(
            f"{files}: all {n_rows} rows are longer than {named} (shortest: {shortest} tokens); keep all "
            f"with {whole}"
        )
    if n_overlong:
        logger.warning("%s: dropped %d of %d rows, longer than %s tokens", files, n_overlong, n_rows, named)
    return kept


def create_rl_dataset(
    files: Files,
    data_config: Any,
    tokenizer: PreTrainedTokenizerBase,
    processor: Any = None,
    *,
    tools_of: Callable[[Mapping[str, Any]], list[dict[str, Any]]] | None = None,
) -> RLHFDataset:
    """Build the data set that ``config.data`` describes; one of Hydra needs only the keys that differ.

    ``processor`` is that of a model of images and text, or its folder; None: rows with pictures load it from
    the tokenizer's folder. ``tools_of`` returns the tools of a row's environment.
    """
    if isinstance(data_config, Mapping):
        data_config = as_config({"data": dict(data_config)}).data  # dict: resolved beside the other sections
    return RLHFDataset(
        files,
        tokenizer,
        filter_overlong_prompts=data_config.filter_overlong_prompts,
        return_raw_chat=data_config.return_raw_chat,
        return_raw_input_ids=data_config.return_raw_input_ids,
        reward_fn_key=data_config.reward_fn_key,
        answer_key=data_config.answer_key,
        data_source=data_config.data_source,
        tools_of=tools_of,
        processor=processor,
        **prompt_options(data_config),
    )


def prompt_options(data_config: Any) -> dict[str, Any]:
    """Return the arguments that ``config.data`` has for every data set of prompts."""
    names = ("prompt_key", "tools_key", "max_prompt_length", "truncation", "num_workers", "cache_dir")
    names += ("image_key", "min_pixels", "max_pixels", "max_images")
    return {"how": PromptFormat.of(data_config), **{name: getattr(data_config, name) for name in names}}


def prompts_in_words(
    table: PromptTable, prompt_key: str, tokenizer: PreTrainedTokenizerBase, how: PromptFormat
) -> str:
    """Return one line on the treatment of prompts, raising as ``PromptFormat.in_words``."""
    n_continued = int(table.ending_with("assistant", prompt_key).sum())
    n_with_tools = len(table) - table.tools(0, len(table)).count(None)
    is_text = table.has_texts(prompt_key)
    return how.in_words(tokenizer, is_text=is_text, n_continued=n_continued, n_with_tools=n_with_tools)


def log_prompts(*datasets: Any) -> None:
    """Log the ``prompts_in_words`` of data sets that have them; once if they are the same."""
    lines = [dataset.prompts_in_words for dataset in datasets if hasattr(dataset, "prompts_in_words")]
    for line in dict.fromkeys(lines):
        logger.info("%s", line)


def truncate(ids: np.ndarray, limit: int, side: str) -> np.ndarray:
    """Return at most ``limit`` ids, cut on ``side``; ``middle`` keeps the first limit // 2 and the end."""
    if len(ids) <= limit:
        return ids
    if side == "left":
        return ids[-limit:]
    if side == "right":
        return ids[:limit]
    head = limit // 2
    return np.concatenate([ids[:head], ids[len(ids) - (limit - head) :]])


class Subset:
    """The rows ``rows`` of ``dataset``."""

    def __init__(self, dataset: RowDataset, rows: Sequence[int]) -> None:
        self.dataset, self.rows = dataset, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.dataset[self.rows[row]]

    def data_sources(self) -> set[str]:
        """Return the data sources of the whole ``dataset``."""
        return self.dataset.data_sources()


def first_of_each_source(dataset: RowDataset, limit: int, reward_fn_key: str) -> Subset:
    """Return the first ``limit`` rows of every data source, in the order of ``dataset``."""
    taken: Counter[str] = Counter()
    rows = []
    for row in range(len(dataset)):
        source = _source_of(columns_of(dataset, row), reward_fn_key)
        taken[source] += 1
        if taken[source] <= limit:
            rows.append(row)
    return Subset(dataset, rows)


def pictures_digest(dataset: RowDataset) -> str | None:
    """Return a digest of the pictures of a data set; None if it has none, or is of another class."""
    pictures = getattr(all_rows(dataset), "pictures", None)
    return pictures.digest() if isinstance(pictures, PromptPictures) else None


def max_pictures(dataset: RowDataset) -> int:
    """Return the most pictures of a row, 0 for rows of text; also of a user's data set around one of strop's.

    All rows have as many digests.
    """
    known: Any = getattr(all_rows(dataset), "pictures", dataset)
    if known is None or isinstance(known, PromptPictures):  # without a row, for which torch would be loaded
        return 0 if known is None else known.columns.shape[1]
    row: Any = columns_of(dataset, 0) if len(dataset) else None
    images: Any = row.get("images") if isinstance(row, Mapping) else None  # rows of a user may be anything
    # without pictures images may be a column of the user
    return len(images) if str(getattr(images, "dtype", "")).endswith("int64") else 0


def image_processor_name(*datasets: RowDataset) -> str | None:
    """Return the class that makes the pixels of pictures; None without pictures, and for a user's data set.

    It names its back-end: that of Pillow makes other pixels than that of torchvision.
    """
    known = (getattr(all_rows(dataset), "pictures", None) for dataset in datasets)
    found = next((pictures for pictures in known if isinstance(pictures, PromptPictures)), None)
    return None if found is None else type(found.processor.image_processor).__name__


def columns_of(dataset: RowDataset, row: int) -> dict[str, Any]:
    """Return a row; of an ``RLHFDataset`` as ``columns`` does, which needs no torch."""
    while isinstance(dataset, Subset):
        dataset, row = dataset.dataset, dataset.rows[row]
    return dataset.columns(row) if isinstance(dataset, RLHFDataset) else dataset[row]


def data_sources_of(dataset: RowDataset, reward_fn_key: str) -> set[str]:
    """Return the data sources of a data set; one of the user may lack the method, and the column."""
    if hasattr(all_rows(dataset), "data_sources"):
        return dataset.data_sources()
    return {_source_of(dataset[row], reward_fn_key) for row in range(len(dataset))}


def _source_of(row: Mapping[str, Any], reward_fn_key: str) -> str:
    return row.get(reward_fn_key, "unnamed")


def all_rows(dataset: RowDataset) -> RowDataset:
    """Return the data set of which ``dataset`` is a subset, or ``dataset`` itself."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset
