"""Token ids of a whole column: in parallel for many rows, cached on disk.

Cached ids are not truncated, so ``max_prompt_length`` and ``truncation`` are not part of the cache's key.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import pickle
import re
import zipfile
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from strop.config.machine import usable_cores
from strop.data.control_tokens import control_tokens
from strop.data.fetch import Advance, cache_folder, progress_bar
from strop.data.pictures.expand import PromptPictures
from strop.data.pictures.parts import MARK
from strop.data.prompt_table import OWN_TOOLS, PromptTable, with_exact
from strop.data.prompts import AUTO, PromptError, PromptFormat, encode_prompts, writes_date
from strop.data.records import exact_name
from strop.files import atomic_path
from strop.manifest import digest_of_arrays

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("strop.data")

Encode = Callable[..., list[list[int]]]
"""(values of a column, tokenizer, how=) -> token ids; a module-level function, so that it can be pickled."""
Chunk = Sequence[Sequence[int] | np.ndarray]  # token ids of consecutive prompts

CHUNK_ROWS = 1_000
# A worker process takes seconds to import transformers. A fast tokenizer already uses all cores in Rust, so
# processes only parallelize its templates; a tokenizer written in Python gains sooner.
MIN_ROWS_FOR_PROCESSES = {"fast": 100_000, "slow": 5_000}
MIN_ROWS_FOR_BAR = 5_000


@dataclass(frozen=True)
class TokenizedPrompts:
    """Token ids of N prompts in one flat array: prompt i is ``ids[offsets[i]:offsets[i + 1]]``.

    ``ids`` int32 [total], ``offsets`` int64 [N + 1].
    """

    ids: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, prompts: Iterable[Sequence[int] | np.ndarray]) -> TokenizedPrompts:
        """Return the ids of each of ``prompts``."""
        arrays = [np.asarray(ids, dtype=np.int32) for ids in prompts]
        offsets = np.zeros(len(arrays) + 1, dtype=np.int64)  # all tokens may exceed 2^31, an id does not
        np.cumsum([len(array) for array in arrays], out=offsets[1:])
        return cls(np.concatenate(arrays), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.ids[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per prompt, int64 [N]."""
        return np.diff(self.offsets)

    def with_last(self, token_id: int) -> TokenizedPrompts:
        """Return these ids with ``token_id`` in the place of the last one of each."""
        ids = self.ids.copy()
        ids[self.offsets[1:] - 1] = token_id
        return TokenizedPrompts(ids, self.offsets)

    def framed(
        self, before: Sequence[int], after: Sequence[int], rows: np.ndarray, cut: np.ndarray
    ) -> TokenizedPrompts:
        """Return the ids of ``rows``, bool [N], between ``before`` and ``after``; the last one stays last.

        Those that are ``cut``, bool [N], get no ``after``.
        """
        each = zip(map(self.__getitem__, range(len(self))), rows, cut, strict=True)
        return TokenizedPrompts.of(
            np.concatenate([before, ids[:-1], [] if is_cut else after, ids[-1:]]) if is_framed else ids
            for ids, is_framed, is_cut in each
        )

    def first(self) -> np.ndarray:
        """Return the first id of each, int32 [N]."""
        return self.ids[self.offsets[:-1]]

    def before_last(self) -> np.ndarray:
        """Return the last id but one of each, int64 [N]; -1 where there is only one."""
        return np.where(self.lengths > 1, self.ids[np.maximum(self.offsets[1:] - 2, 0)], -1)

    def without_last(self, rows: np.ndarray) -> TokenizedPrompts:
        """Return these ids without the last one of the ``rows``, bool [N]; one token always stays."""
        shorter = rows & (self.lengths > 1)
        kept = np.ones(len(self.ids), dtype=bool)
        kept[self.offsets[1:][shorter] - 1] = False
        return TokenizedPrompts(self.ids[kept], np.append(0, np.cumsum(self.lengths - shorter)))


def tokenize_table(
    table: PromptTable,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_key: str = "prompt",
    encode: Encode = encode_prompts,
    how: PromptFormat = AUTO,
    num_workers: int | None = None,
    cache_dir: str | Path | None = None,
    pictures: PromptPictures | None = None,
) -> TokenizedPrompts:
    """Return token ids of the column ``prompt_key``, from the cache below ``cache_dir`` (None: no cache).

    ``encode`` computes them in the format ``how``. ``num_workers`` processes (None: one per core) are used
    where they pay off: from 100,000 rows on, or 5,000 with a tokenizer written in Python. Raises
    :class:`DataError` naming file, row and field of the first unusable value, and for tools that the chat
    template leaves out.
    """
    if not how.allow_special_tokens:
        # with pictures <image>, a control token of some families, is the mark of a place
        names = [name for name in control_tokens(tokenizer).names if table.images is None or name != MARK]
        _warn_of_control_tokens(table, prompt_key, names)
    has_tools = encode is encode_prompts and table.tools_key is not None
    cache = None
    if cache_dir is not None:
        columns = [
            with_exact(table.table, prompt_key),
            *([table.table.select([table.tools_key])] if has_tools else []),
        ]
        cache = _cache_path(columns, tokenizer, encode, how, cache_dir, pictures)
    if cache is not None and (found := _load(cache, len(table), pictures)) is not None:
        return found
    if has_tools:
        _require_rendered_tools(table, tokenizer, prompt_key, how, pictures)
    workers = usable_cores() if num_workers is None else num_workers
    with progress_bar(f"tokenizing {prompt_key}", len(table), show=len(table) >= MIN_ROWS_FOR_BAR) as advance:
        own = partial(encode, how=how)
        chunks = _encode_all(table, tokenizer, prompt_key, own, workers, advance, has_tools, pictures)
    result = TokenizedPrompts.of(itertools.chain.from_iterable(chunks))
    if cache is not None:
        _save(cache, result, pictures)
    return result


def _require_rendered_tools(
    table: PromptTable,
    tokenizer: Any,
    prompt_key: str,
    how: PromptFormat,
    pictures: PromptPictures | None,
) -> None:
    """Raise ``DataError`` if the first prompt that has tools has the same tokens without them.

    Of the tools of an environment, which a prompt may name in its own words, it is a warning.
    """
    tools = table.tools(0, len(table))
    row = next(row for row, own in enumerate(tools) if own is not None)
    prompts = table.values(prompt_key, row, row + 1)
    own = None if pictures is None else pictures.expansions(row, row + 1)
    try:
        with_tools = encode_prompts(prompts, tokenizer, how, [tools[row]], own)
        if with_tools != encode_prompts(prompts, tokenizer, how, None, own):
            return
    except PromptError as error:
        raise table.error(row, prompt_key, error.reason) from error
    if table.tools_key == exact_name(OWN_TOOLS):
        logger.warning(
            "warning: the chat template leaves out the tools of the environment: the prompts must name them, "
            "and how they are called, or set data.chat_template to one that shows them"
        )
        return
    raise table.error(
        row,
        str(table.tools_key),
        "the chat template leaves out the tools: use a template that takes them (data.chat_template), or set "
        "data.tools_key=null to leave them out on purpose",
    )


def _warn_of_control_tokens(table: PromptTable, column: str, names: Sequence[str]) -> None:
    """Log how many texts hold control tokens; prompts that were rendered beforehand rely on them."""
    # one pass for all names, of which Llama 3 has 256 and Mistral 1,000: hardly any text holds one
    anyone = pc.MatchSubstringOptions("|".join(map(re.escape, names)))
    texts = [
        text.filter(pc.call_function("match_substring_regex", [text], anyone))
        for chunk in table.table.column(column).chunks
        for text in (_texts(chunk) if names else ())
    ]
    found = {name: sum(_count(text, name) for text in texts) for name in names}
    if any(found.values()):
        most = max(found, key=lambda name: found[name])
        logger.warning(
            "%s: %d texts of the column %s hold %r, a control token of the model; in a data set these are "
            "encoded as text (chat messages get control tokens from the template; "
            "data.allow_special_tokens=True keeps them, as in prompts that were rendered beforehand)",
            ", ".join(table.files), found[most], column, most,
        )  # fmt: skip


def _texts(values: pa.Array) -> Iterator[pa.Array]:
    """Yield the texts of a column, at any depth."""
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        yield values
    elif pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        yield from _texts(values.flatten())
    elif pa.types.is_struct(values.type):
        for field in values.flatten():
            yield from _texts(field)


def _count(texts: pa.Array, name: str) -> int:
    """Return the number of texts that hold ``name``."""
    found = pc.call_function("match_substring", [texts], pc.MatchSubstringOptions(name))
    return found.true_count


def _encode_all(
    table: PromptTable,
    tokenizer: PreTrainedTokenizerBase,
    prompt_key: str,
    encode: Encode,
    workers: int,
    advance: Advance,
    has_tools: bool,
    pictures: PromptPictures | None,
) -> list[Chunk]:
    def chunks_of_values() -> Iterator[tuple[list[Any], Encode]]:
        for start in range(0, len(table), CHUNK_ROWS):
            values, own = table.values(prompt_key, start, start + CHUNK_ROWS), encode
            if has_tools:
                own = partial(own, tools=table.tools(start, start + len(values)))
            if pictures is not None:
                own = partial(own, pictures=pictures.expansions(start, start + len(values)))
            yield values, own

    def collect(results: Generator[Callable[[], Chunk]]) -> list[Chunk]:
        chunks = []
        with closing(results):  # after an error, cancel what is in flight
            for number, result in enumerate(results):
                try:
                    chunks.append(result())
                except PromptError as error:
                    row = number * CHUNK_ROWS + error.offset
                    raise table.error(row, prompt_key, error.reason) from error
                advance(len(chunks[-1]))
        return chunks

    enough = MIN_ROWS_FOR_PROCESSES["fast" if tokenizer.is_fast else "slow"]
    if workers > 1 and len(table) >= enough:
        try:
            return collect(_in_processes(chunks_of_values(), tokenizer, workers))
        except (BrokenProcessPool, pickle.PicklingError, AttributeError, TypeError) as error:
            # A script without `if __name__ == "__main__"` cannot spawn; a custom tokenizer may not pickle.
            logger.warning("tokenizing in one process: worker processes failed (%s)", error)
    return collect(partial(own, values, tokenizer) for values, own in chunks_of_values())


def _in_processes(
    chunks: Iterator[tuple[list[Any], Encode]], tokenizer: PreTrainedTokenizerBase, workers: int
) -> Generator[Callable[[], Chunk]]:
    """Yield for every chunk of values, in order, the function that waits for its token ids."""
    pickle.dumps(tokenizer)  # fail here, not in the pool's feeder thread
    # spawn: forking a process with torch's threads can deadlock.
    context = multiprocessing.get_context("spawn")
    pending: deque[Callable[[], Chunk]] = deque()
    with ProcessPoolExecutor(workers, context, _start_worker, (tokenizer,)) as pool:
        try:
            for values, encode in chunks:
                pending.append(pool.submit(_encode_chunk, values, encode).result)
                if len(pending) > 4 * workers:  # keep all busy without holding all prompts twice
                    yield pending.popleft()
            yield from pending
        finally:
            pool.shutdown(cancel_futures=True)


_worker_tokenizer: Any = None


def _start_worker(tokenizer: PreTrainedTokenizerBase) -> None:
    global _worker_tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # parallelism comes from the processes
    _worker_tokenizer = tokenizer


def _encode_chunk(values: list[Any], encode: Encode) -> Chunk:
    # Arrays are sent between processes in a tenth of the time of lists of ints.
    return [np.asarray(ids, dtype=np.int32) for ids in encode(values, _worker_tokenizer)]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of everything that determines the token ids of a prompt, but the date."""
    import tokenizers
    import transformers

    backend = getattr(tokenizer, "backend_tokenizer", None)  # only fast tokenizers have one
    if backend is not None:
        model = json.loads(backend.to_str())
        # Leftovers of the last padded batch; they do not change our ids.
        model.pop("padding", None)
        model.pop("truncation", None)
    else:
        model = sorted(tokenizer.get_vocab().items())
    template = tokenizer.chat_template
    facts = {
        "class": type(tokenizer).__name__,
        "model": hashlib.sha256(repr(model).encode()).hexdigest(),  # as JSON it would take 5 times as long
        "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "chat_template": template,
        "versions": [transformers.__version__, tokenizers.__version__],
        "date": None,  # models given as objects are saved under names with this hash
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _cache_path(
    columns: Sequence[pa.Table],
    tokenizer: PreTrainedTokenizerBase,
    encode: Encode,
    how: PromptFormat,
    cache_dir: str | Path,
    pictures: PromptPictures | None,
) -> Path:
    key = {
        # 1: control tokens in users' text were control tokens; 2: assistants' turns were closed;
        # 3: no digest; 4: records had keys of other rows
        "layout": 5,
        "encode": getattr(encode, "__name__", repr(encode)),
        "format": dataclasses.asdict(how),
        "values": list(map(_digest, columns)),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        **({"date": date.today().isoformat()} if writes_date(tokenizer) else {}),
        # 2: with the counts of each size; 3: of the tokens of features, which are others than marks for Gemma
        **({} if pictures is None else {"pictures": [pictures.digest(), 3]}),
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder(cache_dir) / "tokens" / f"{name}.npz"


def _digest(table: pa.Table) -> str:
    """Return a digest of a table's content, which does not depend on the format that it was read from."""
    digest = hashlib.sha256(str(table.schema.types).encode())
    for start in range(0, len(table), CHUNK_ROWS):
        # in equal chunks: readers of other formats cut a table differently
        for batch in table.slice(start, CHUNK_ROWS).combine_chunks().to_batches():
            digest.update(batch.serialize())
    return digest.hexdigest()


def _load(path: Path, rows: int, pictures: PromptPictures | None) -> TokenizedPrompts | None:
    """Return cached ids, or None if there are none or they are not what was written under this name."""
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as stored:
            found, digest = TokenizedPrompts(stored["ids"], stored["offsets"]), str(stored["digest"])
            if len(found) != rows or digest != _digest_of(path, found):
                raise ValueError("it does not match its data")
            if pictures is not None:
                pictures.recall(stored["pictures"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        logger.warning("the token cache %s is damaged (%s); tokenizing again", path, error)
        return None
    return found


def _digest_of(path: Path, tokens: TokenizedPrompts) -> str:
    """Return a digest of ids and of the file's name, which stands for what they were made from."""
    return digest_of_arrays({f"{path.stem} ids": tokens.ids, f"{path.stem} offsets": tokens.offsets})


def _save(path: Path, tokens: TokenizedPrompts, pictures: PromptPictures | None) -> None:
    columns: dict[str, Any] = {"ids": tokens.ids, "offsets": tokens.offsets}
    columns |= {} if pictures is None else {"pictures": pictures.counts()}
    try:
        with atomic_path(path) as temporary, temporary.open("wb") as handle:
            np.savez(handle, **columns, digest=np.array(_digest_of(path, tokens)))
    except OSError as error:  # a full disk or read-only home only costs time at the next start
        logger.warning("the token cache %s cannot be written: %s", path, error)
