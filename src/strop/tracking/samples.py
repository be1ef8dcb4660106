"""Samples of a step as rows of a parquet file: text, ids, masks, scores by part, per-token values.

``SAMPLE_COLUMNS`` of :mod:`strop.columns` lists the columns; each is there only if the batch has its source.
Lists have the sample's real length, without padding. Shapes: B samples, P padded prompt tokens, T padded
response tokens.
"""

from __future__ import annotations

import base64
import itertools
import json
import logging
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from strop import pictures
from strop.columns import ENDED_BY, REWARD_TEXT, TOKEN_COLUMNS
from strop.errors import DataError
from strop.files import atomic_path
from strop.terminal import printable

if TYPE_CHECKING:
    from torch import Tensor

    from strop.protocol import DataProto

logger = logging.getLogger(__name__)

InWords = Callable[[str, Sequence[int]], str]
"""(prompt, digests of its pictures) -> prompt with words in place of the pictures' placeholders."""
TOKEN_TEXTS = b"token_texts"
"""Metadata of a samples file, for ``unpack_texts``: the text of each token in the file's responses."""
_TOKENS_OF_A_GROUP = 1 << 18
"""Response tokens of a row group, about: a viewer of one sample reads its group only."""


def step_file(folder: Path, step: int, suffix: str = ".parquet") -> Path:
    return folder / f"step_{step:06d}{suffix}"


def steps_with_file(folder: Path, suffix: str = ".parquet") -> list[int]:
    """Return the steps that have a file, in order."""
    names = (path.stem.removeprefix("step_") for path in folder.glob(f"step_*{suffix}"))
    return sorted(int(name) for name in names if name.isdecimal() and len(name) >= 6)


def find_step(folder: Path, wanted: int | None = None) -> int | None:
    """Return ``wanted``, or the last step that has a file; None if none has, and none is wanted.

    Raises ``DataError`` if the wanted step has no file.
    """
    written = steps_with_file(folder)
    if wanted is None or wanted in written:
        return wanted if wanted is not None else written[-1] if written else None
    if not written:
        raise DataError(f"{folder}: no samples were written (trainer.log_rollouts, trainer.test_freq)")
    nearest = min(written, key=lambda step: abs(step - wanted))
    raise DataError(
        f"{folder}: no samples of step {wanted}; it has {len(written)} steps from {written[0]} to "
        f"{written[-1]}, the nearest is {nearest} (trainer.rollouts_to_keep, trainer.log_rollouts_freq)"
    )


@contextmanager
def reading_samples(path: Path) -> Generator[None]:
    """Turn the errors of a missing, deleted or damaged file into ``DataError``."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such samples (trainer.rollouts_to_keep deletes old ones)") from error
    except (OSError, pa.ArrowException, KeyError, UnicodeDecodeError, AttributeError, TypeError) as error:
        # the last two: columns of these names with other types
        raise DataError(f"{path}: not a file of samples: {error}") from error


def write_table(path: Path, table: pa.Table) -> None:
    """Write rows of samples to ``path`` atomically, creating its folder."""
    texts = [field.name for field in table.schema if pa.types.is_string(field.type)]
    metadata, schema = table.schema.metadata or {}, table.schema.remove_metadata()
    numbers = [f"{name}.list.element" for name in TOKEN_COLUMNS if name in table.schema.names]
    # Per-token floats rarely repeat, so dictionaries and statistics would cost time for nothing. Bytes at
    # one place in the numbers do repeat: exponents, and the zeros that rounding leaves.
    with (
        atomic_path(path, durable=False) as temporary,  # a power cut may cost samples, no state
        pq.ParquetWriter(
            temporary,
            schema,
            compression="zstd",
            use_dictionary=texts,
            write_statistics=False,
            use_byte_stream_split=numbers,
        ) as writer,
    ):
        writer.write_table(table.replace_schema_metadata(), row_group_size=_row_group_size(table))
        writer.add_key_value_metadata(metadata)  # in the schema, it would be stored twice


def _row_group_size(table: pa.Table) -> int:
    tokens = len(table["response_ids"].combine_chunks().flatten())
    return max(int(_TOKENS_OF_A_GROUP * len(table) / max(tokens, 1)), 1)


def samples_table(batch: DataProto, tokenizer: Any, in_words: InWords | None = None) -> pa.Table:
    """Return the samples of a batch as rows.

    The prompt's text keeps its special tokens, as the model saw it, with pictures as ``in_words`` has them;
    the response's text has none, as the reward saw it. A response with ``hidden_tokens`` has a second text
    with them.
    """
    tensors = {name: _to_numpy(tensor) for name, tensor in batch.batch.items()}
    # The attention mask includes tokens that a tool inserted into the response (their response_mask is 0).
    prompt_width = tensors["prompts"].shape[1]
    prompt_real_BP, response_real_BT = np.hsplit(tensors["attention_mask"].astype(bool), [prompt_width])
    prompt_ids = _lists(tensors["prompts"].astype(np.int32), prompt_real_BP)
    response_ids = _lists(tensors["responses"].astype(np.int32), response_real_BT)

    columns = _labels(batch.non_tensor_batch)
    columns["prompt"] = _decode_each_once(prompt_ids, tokenizer, skip_special_tokens=False)
    if "images" in tensors:
        images = [[digest for digest in row if digest] for row in tensors["images"].tolist()]
        if in_words is not None:
            columns["prompt"] = _with_pictures(columns["prompt"], images, in_words)
        names = [[pictures.name(digest) for digest in row] for row in images]
        columns["images"] = pa.array(names, pa.list_(pa.string()))
    columns["response"] = _decode_each_once(response_ids, tokenizer, skip_special_tokens=True)
    if "n_turns" in tensors:  # without turns, conversation may be a column of the data
        texts = batch.non_tensor_batch["conversation"].tolist()
        columns["conversation"] = pa.array(texts, pa.string())
        columns["n_turns"] = pa.array(tensors["n_turns"])
        columns["ended_by"] = pa.array([ENDED_BY[code] for code in tensors["ended_by"]], pa.string())
    if "hidden_tokens" in tensors:
        columns["hidden_tokens"] = pa.array(tensors["hidden_tokens"].astype(np.int32))
        columns["response_with_special_tokens"] = _whole_texts(
            response_ids, tensors["hidden_tokens"] > 0, tokenizer
        )
    if "truncated" in tensors:
        columns["truncated"] = pa.array(tensors["truncated"].astype(bool))
    if "token_level_scores" in tensors:
        counts_BT = tensors["response_mask"] > 0
        counts_BT |= ~counts_BT.any(axis=1, keepdims=True)  # of a sample without tokens, such as a lost one
        scores_BT = np.where(counts_BT, tensors["token_level_scores"], 0.0)
        columns["score"] = pa.array(scores_BT.sum(axis=1, dtype=np.float64).astype(np.float32))
    for name, values in tensors.items():
        if name.startswith("reward/"):  # NaN (the part does not apply to the sample) becomes null
            columns[name] = pa.array(values.astype(np.float32), from_pandas=True)
    for name, values in batch.non_tensor_batch.items():
        if name.startswith(REWARD_TEXT):
            columns[name] = pa.array(values.tolist(), pa.string())
    if "reward_failed" in tensors:
        columns["reward_failed"] = pa.array(tensors["reward_failed"].astype(bool))
    sampled_BT = response_real_BT & (tensors["response_mask"] > 0)
    columns["response_length"] = pa.array(sampled_BT.sum(axis=1, dtype=np.int32))
    columns["prompt_ids"], columns["response_ids"] = prompt_ids, response_ids
    columns["response_mask"] = _lists(tensors["response_mask"].astype(np.int8), response_real_BT)
    if "follows" in tensors:
        columns["follows"] = _lists(tensors["follows"].astype(np.int32), response_real_BT)
    if "rollout_versions" in tensors:
        columns["rollout_versions"] = _lists(tensors["rollout_versions"], response_real_BT)
    for name, bits in TOKEN_COLUMNS.items():
        if name in tensors:
            columns[name] = _lists(_rounded(tensors[name].astype(np.float32), bits), response_real_BT)
    return pa.table(columns, metadata={TOKEN_TEXTS: pack_texts(_token_texts(response_ids, tokenizer))})


class HiddenTokensWarning:
    """Warn once of special tokens inside responses: the text that is scored lacks them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._warned = tokenizer, False

    def __call__(self, batch: DataProto) -> None:
        """Log the warning if a sample of the batch has ``hidden_tokens``, with the text of one."""
        if self._warned or "hidden_tokens" not in batch or not (batch.batch["hidden_tokens"] > 0).any():
            return
        self._warned = True
        rows = (batch.batch["hidden_tokens"] > 0).nonzero()[:, 0]
        row = int(rows[0])
        mask_T = batch.batch["response_mask"][row].bool()
        text = self._tokenizer.decode(batch.batch["responses"][row][mask_T].tolist())
        logger.warning(
            "warning: %d of %d responses have special tokens before their end, or ids without a token. "
            "Rewards do not see them, because responses are decoded without special tokens; "
            "response/hidden_tokens counts them, and samples are shown with them. The first: %s",
            len(rows), len(batch), printable(text if len(text) <= 400 else f"{text[:400]}..."),
        )  # fmt: skip


def _to_numpy(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    # numpy has no bfloat16
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()


def _rounded(values: np.ndarray, bits: int) -> np.ndarray:
    """Round float32 numbers to ``bits`` significant bits; NaN, infinity and what would become it stay."""
    dropped = np.uint32(24 - bits)  # float32 has 24, one of them implied
    half = np.uint32(1) << (dropped - np.uint32(1))
    # on the bits: a carry out of the mantissa is the next exponent, which is the right number
    rounded = ((values.view(np.uint32) + half) >> dropped << dropped).view(np.float32)
    # rounding up can carry into the exponent of infinity, and changes NaN's bits
    return np.where(np.isfinite(values) & np.isfinite(rounded), rounded, values)


def _lists(values: np.ndarray, real: np.ndarray) -> pa.ListArray:
    """Return the values [B, L] at ``real`` [B, L] as B lists, without a Python loop over rows."""
    offsets = np.zeros(len(values) + 1, dtype=np.int32)
    np.cumsum(real.sum(axis=1), out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values[real]))


def _decode_each_once(ids: pa.ListArray, tokenizer: Any, *, skip_special_tokens: bool) -> pa.Array:
    """Return texts of id lists; equal lists (a prompt's n samples) are decoded once, as decoding is slow."""
    flat, offsets = ids.values.to_numpy(), ids.offsets.to_numpy()
    rows = [flat[start:end] for start, end in itertools.pairwise(offsets)]
    keys = [row.tobytes() for row in rows]
    distinct = {key: row.tolist() for key, row in zip(keys, rows, strict=True)}
    texts = tokenizer.batch_decode(list(distinct.values()), skip_special_tokens=skip_special_tokens)
    text_of = dict(zip(distinct, texts, strict=True))
    return pa.array([text_of[key] for key in keys], pa.string())


def _with_pictures(texts: pa.Array, images: Sequence[Sequence[int]], in_words: InWords) -> pa.Array:
    """Return prompts with each picture in words; a prompt's n samples are equal."""
    keys = [(text, *row) for text, row in zip(texts.to_pylist(), images, strict=True)]
    words = {(text, *row): in_words(text, row) for text, *row in dict.fromkeys(keys)}
    return pa.array([words[key] for key in keys], pa.string())


def pack_texts(texts: Mapping[int, str]) -> bytes:
    """Return texts by token id as base64 of zlib-compressed JSON: parquet does not compress metadata."""
    return base64.b64encode(zlib.compress(json.dumps(texts).encode()))


def unpack_texts(packed: bytes) -> dict[str, str]:
    """Return the text of each token by its id, as a string; none of a file that packs them otherwise."""
    try:
        return json.loads(zlib.decompress(base64.b64decode(packed)))
    except (ValueError, zlib.error):
        return {}


def _token_texts(ids: pa.ListArray, tokenizer: Any) -> dict[int, str]:
    """Return the text of each distinct token: what a second one adds to a first.

    Some tokenizers drop the space before the first word of a text. A part of a character is "\ufffd".
    """
    distinct = np.unique(ids.values.to_numpy()).tolist()
    if not distinct:  # batch_decode returns one text for no lists
        return {}
    once = tokenizer.batch_decode([[token] for token in distinct], skip_special_tokens=False)
    twice = tokenizer.batch_decode([[token, token] for token in distinct], skip_special_tokens=False)
    return {
        token: second.removeprefix(first) if second.startswith(first) else first
        for token, first, second in zip(distinct, once, twice, strict=True)
    }


def _whole_texts(ids: pa.ListArray, wanted_B: np.ndarray, tokenizer: Any) -> pa.Array:
    """Return the texts with special tokens of the ``wanted_B`` [B] id lists, null for the others."""
    rows = np.flatnonzero(wanted_B)
    if not len(rows):  # batch_decode returns one text for no lists
        return pa.nulls(len(ids), pa.string())
    texts = _decode_each_once(ids.take(pa.array(rows)), tokenizer, skip_special_tokens=False)
    text_of = dict(zip(rows.tolist(), texts.to_pylist(), strict=True))
    return pa.array([text_of.get(row) for row in range(len(ids))], pa.string())


def _labels(objects: Mapping[str, np.ndarray]) -> dict[str, pa.Array]:
    """Return ``uid``, ``data_source`` and ``ground_truth`` as strings (a structured ground truth as JSON)."""
    columns = {
        name: pa.array([_as_text(value) for value in objects[name]], pa.string())
        for name in ("uid", "data_source")
        if name in objects
    }
    if "reward_model" in objects:
        truths = [_as_text((row or {}).get("ground_truth")) for row in objects["reward_model"]]
        columns["ground_truth"] = pa.array(truths, pa.string())
    return columns


def _as_text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)
