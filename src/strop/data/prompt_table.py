"""Tables of prompts: reading, and checks of the columns that rewards need.

Rows count from 0 in every message. Nothing here imports torch.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from strop.data.control_tokens import PromptError
from strop.data.pictures.parts import text_of
from strop.data.pictures.read import COLUMNS, Reader, has_values, refuse_media
from strop.data.prompts import as_messages, chat_of_text, prompt_problem, tools_of
from strop.data.records import exact_name, table_of, to_rows, visible_names
from strop.data.sources import Files, Rows, folder_of, read_table, reading, require_readable, value_at
from strop.errors import DataError, nearest, raised_as

logger = logging.getLogger("strop.data")


@dataclass(frozen=True)
class PromptTable:
    """The rows of one or several sources, in order.

    ``files`` are the names as the user wrote them, ``starts`` the row number of each file's first row in
    ``table``. A column that only some files have is null in the rows of the others.
    """

    table: pa.Table
    files: tuple[str, ...]
    starts: tuple[int, ...]
    tools_key: str | None = None
    """The column of tools, as JSON text; None if no row has any."""
    images: Sequence[Sequence[int]] | None = None
    """Digests of each row's pictures in the order of their places; None if no row has any."""

    def __len__(self) -> int:
        return self.table.num_rows

    @property
    def names(self) -> list[str]:
        """Names of the columns that at least one file has."""
        return visible_names(self.table.column_names)

    def locate(self, row: int) -> tuple[str, int]:
        """Return the file of row ``row`` of the table, and its row number in the file."""
        which = bisect_right(self.starts, row) - 1
        return self.files[which], row - self.starts[which]

    def error(self, row: int, field: str, problem: str) -> DataError:
        """Return an error that names file, row and field."""
        name, row_in_file = self.locate(row)
        return DataError(f"{name}, row {row_in_file}, field {field}: {problem}")

    def has_texts(self, column: str) -> bool:
        """Return True if a column holds strings, False for any other type."""
        return _is_string(self.table.column(column).type)

    def ending_with(self, role: str, column: str) -> np.ndarray:
        """Return True, bool [N], for rows whose last message in a column of chats is of ``role``."""
        found = [np.zeros(0, dtype=bool)]
        for chats in self.table.column(column).chunks:
            if not _are_chats(chats.type):
                return np.zeros(len(self), dtype=bool)
            lengths = (
                pc.call_function("list_value_length", [chats]).fill_null(0).to_numpy(zero_copy_only=False)
            )
            # the place of each chat's last message among the messages of all
            last = np.cumsum(lengths)[lengths > 0] - 1
            roles = _field(chats.flatten(), "role").take(pa.array(last))
            found.append(np.zeros(len(chats), dtype=bool))
            found[-1][lengths > 0] = [name == role for name in roles.to_pylist()]
        return np.concatenate(found)

    def without(self, pattern: str, column: str, rows_N: np.ndarray) -> PromptTable:
        """Return the table without the first match of ``pattern`` in each text of a column, in ``rows_N``."""
        if not self.has_texts(column):
            return self
        texts = self.table.column(column)
        texts = texts.cast(pa.large_string()) if pa.types.is_dictionary(texts.type) else texts
        options = pc.ReplaceSubstringOptions(pattern, "", max_replacements=1)
        shorter = pc.call_function("replace_substring_regex", [texts], options)
        found = pc.call_function("if_else", [pa.array(rows_N), shorter, texts])
        place = self.table.column_names.index(column)
        return replace(self, table=self.table.set_column(place, column, found))

    def values(self, column: str, start: int, stop: int) -> list[Any]:
        """Return rows ``start`` to ``stop`` of a column as plain Python values."""
        return _values(self.table.slice(start, stop - start), column)

    def tools(self, start: int, stop: int) -> list[str | None]:
        """Return the tools of rows ``start`` to ``stop``, each the JSON of a list, or None without tools."""
        if self.tools_key is None:
            return [None] * (stop - start)
        return self.table.column(self.tools_key).slice(start, stop - start).to_pylist()

    def with_tools(self, tools_of: Callable[[Mapping[str, Any]], list[dict[str, Any]]]) -> PromptTable:
        """Return the table with the tools of an environment, which ``tools_of`` a row returns.

        Raises :class:`DataError` if a row has tools of its own, or ``tools_of`` raises ``ValueError``.
        """
        if self.tools_key is not None:
            found = [value is not None for value in self.tools(0, len(self))].index(True)
            raise self.error(
                found,
                self.tools_key,
                "the row has tools, and the prompt shows those of environment.path and environment.tools: "
                "leave one of the two out (data.tools_key=null ignores the column)",
            )
        column = "environment"
        rows = (
            [{column: value} for value in self.table.column(column).to_pylist()]
            if column in self.table.column_names
            else [{}] * len(self)
        )
        texts = []
        for number, row in enumerate(rows):
            try:
                texts.append(json.dumps(tools) if (tools := tools_of(row)) else None)
            except ValueError as error:
                raise self.error(number, column, str(error)) from None
        if not any(texts):
            return self
        key = exact_name(OWN_TOOLS)
        return replace(self, table=self.table.append_column(key, pa.array(texts, pa.string())), tools_key=key)

    def row(self, row: int) -> dict[str, Any]:
        """Return one row as plain Python values."""
        return to_rows(self.table.slice(row, 1))[0]


def with_exact(table: pa.Table, column: str) -> pa.Table:
    """Return the column, with the one of ``exact_name`` if there is one."""
    return table.select([name for name in (column, exact_name(column)) if name in table.column_names])


def _values(table: pa.Table, column: str) -> list[Any]:
    return [row[column] for row in to_rows(with_exact(table, column))]


def read_prompt_table(
    files: Files,
    *,
    prompt_key: str = "prompt",
    answer_keys: Mapping[str, str] | None = None,
    tools_key: str | None = None,
    image_key: str | None = None,
    defaults: Mapping[str, str] | None = None,
    cache_dir: str | Path | None = None,
) -> PromptTable:
    """Read all sources into one table; see :mod:`strop.data.sources` for what they may be.

    ``answer_keys`` maps names of answers to their columns; in them and in prompts, numbers become text. A
    dotted name (``extra_info.answer``) reaches into nested columns, and becomes a column itself. A chat that
    is stored as text becomes messages, one of the answers ``chosen``, ``rejected`` and ``response`` its text.
    ``tools_key`` names the column of tools, if there is one. ``image_key`` names that of pictures, which
    :mod:`strop.pictures` holds (``auto``: that of ``COLUMNS`` with values; None: no column).
    ``defaults`` are columns with one value in all rows, for files that lack them.

    Raises :class:`DataError` for a missing or unreadable file, one without rows or without one of these
    columns, one with video or sound, for a picture that cannot be used, and for files whose columns have
    incompatible types.
    """
    sources = [files] if isinstance(files, str | Path | Rows) else files
    names = [str(source) for source in sources]
    keys = {"prompt": prompt_key, **(answer_keys or {})}
    if not names:
        raise DataError("no data file was given: expected one file or a list of them")
    tables: list[pa.Table] = []
    images: list[Sequence[int]] = []
    for name, source in zip(names, sources, strict=True):
        table = read_table(source, texts=list(keys.values()), cache_dir=cache_dir)
        with reading(name):
            for field in table.schema:
                _require_names(name, field.name, [field])
        require_readable(name, table)
        if not len(table):
            raise DataError(f"{name}: the file has no rows")
        require_columns(name, table, keys)
        if _are_in_answers(table, keys):
            logger.info("%s: prompts are the messages before the answer in %s", name, keys["chosen"])
            chats = _values(table, keys["chosen"])
            table = _with_values(table, prompt_key, [chat[:-1] if chat else None for chat in chats])
        refuse_media(name, table)
        for key in keys.values():
            table = _with_column(table, key)
        for what, key in keys.items():
            if what in ("prompt", *_ANSWERS):
                table = _with_chats(name, table, key, prompt_key)
        if tools_key and _nested(table, tools_key) is not None:
            table = _with_tools(name, _with_column(table, tools_key), tools_key)
        for column, value in (defaults or {}).items():
            if column not in table.column_names:
                table = table.append_column(column, pa.repeat(pa.scalar(value), len(table)))
        if image_key is not None:
            table, digests = _with_pictures(
                name, table, partial(folder_of, source, cache_dir), prompt_key, image_key
            )
            images += digests
        tables.append(table)
    what = f"the columns of {', '.join(names)} have types that cannot be joined"
    with raised_as(DataError, what, pa.ArrowException):
        whole = pa.concat_tables(tables, promote_options="permissive")
    starts = itertools.accumulate((table.num_rows for table in tables[:-1]), initial=0)
    if tools_key not in (None, _TOOLS, *whole.column_names):
        raise DataError(
            f"{', '.join(names)}: there is no column {tools_key!r} (data.tools_key); found "
            f"{visible_names(whole.column_names)}"
        )
    if image_key not in (None, "auto", *whole.column_names) and not any(images):
        raise DataError(
            f"{', '.join(names)}: there is no column {image_key!r} (data.image_key); found "
            f"{visible_names(whole.column_names)}"
        )
    if any(images) and COLUMNS[0] in whole.column_names and not has_values(whole.column(COLUMNS[0])):
        whole = whole.drop_columns([COLUMNS[0]])  # of a file without pictures
    has_tools = tools_key in whole.column_names and whole.column(tools_key).null_count < len(whole)
    own_tools = tools_key if has_tools else None
    return PromptTable(whole, tuple(names), tuple(starts), own_tools, images if any(images) else None)


_ANSWERS = ("response", "chosen", "rejected")
_OTHER_FIELDS = ("tool_calls", "reasoning_content", "reasoning", "thinking")
"""Fields of a message that chat templates write in addition to its content."""
_TOOLS = "tools"
OWN_TOOLS = "environment tools"
"""Name of the tools of an environment in a row."""

_PICTURE_ROWS = 100
"""Rows whose pictures are Python objects at one time."""


def _with_pictures(
    name: str,
    table: pa.Table,
    folder: Callable[[], tuple[Path, bool]],
    prompt_key: str,
    image_key: str,
) -> tuple[pa.Table, list[Sequence[int]]]:
    """Return ``table`` without its pictures, and the digests of each row's."""
    names = [
        name for name in (COLUMNS if image_key == "auto" else (image_key,)) if name in table.column_names
    ]
    filled = [name for name in names if has_values(table.column(name))]
    if len(filled) > 1:
        raise DataError(f"{name}: the columns images and image have values; name one in data.image_key")
    column = next(iter(filled), None)
    has_parts = _may_have_parts(table, prompt_key)
    if column is None and not has_parts:
        return table, [()] * len(table)
    reader = Reader(name, folder, prompt_key, column or "")
    digests, prompts, changed = [], [], False
    for start in range(0, len(table), _PICTURE_ROWS):
        rows = table.slice(start, _PICTURE_ROWS)
        chats = _values(rows, prompt_key) if has_parts else [None] * len(rows)
        values = _values(rows, column) if column is not None else [None] * len(rows)
        for row, (chat, value) in enumerate(zip(chats, values, strict=True), start):
            found, messages = reader.row(row, value, chat)
            digests.append(found)
            prompts.append(messages)
            changed = changed or messages is not chat
    if column is not None:
        table = table.drop_columns(with_exact(table, column).column_names)
    return (_with_values(table, prompt_key, prompts) if changed else table), digests


def _may_have_parts(table: pa.Table, key: str) -> bool:
    """Return True if messages of a column may have contents that are lists with pictures."""
    kind = table.column(key).type
    kind = kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else kind
    place = kind.get_field_index("content") if pa.types.is_struct(kind) else -1
    if place < 0 or pa.types.is_nested(kind.field(place).type):
        return place >= 0
    if (exact := exact_name(key)) not in table.column_names:
        return False
    options = pc.MatchSubstringOptions('"image')
    found = pc.call_function("match_substring", [table.column(exact)], options)
    return bool(pc.call_function("any", [found]).as_py())


def _with_chats(name: str, table: pa.Table, key: str, prompt_key: str) -> pa.Table:
    """Return ``table`` with chats of a column ``key`` as messages, or, if it is one of answers, as texts."""
    column, is_answer = table.column(key), key != prompt_key
    texts: list[Any] = [None] * len(table)
    if _is_string(column.type):
        texts = column.to_pylist()
        begins_chat = re.compile(r"\s*\[\s*\{").match
        if not any(text and begins_chat(text) for text in texts):
            return table
        chats = [chat_of_text(text) for text in texts]
        if not (found := len(chats) - chats.count(None)):
            return table
        logger.info(
            "%s: %d of %d texts of the column %s are chats, read as messages", name, found, len(chats), key
        )
    elif is_answer:
        chats = _values(table, key)
    else:
        return table
    values, prompts = [], _values(table, prompt_key)
    for number, (text, chat, prompt) in enumerate(zip(texts, chats, prompts, strict=True)):
        if is_answer and chat is not None:
            text = _answer(f"{name}, row {number}, field {key}", chat, prompt)
        values.append(text if is_answer else as_messages(text) if chat is None and text else chat)
    return _with_values(table, key, values)


def _answer(where: str, chat: Any, prompt: Any) -> str:
    """Return the answer that ends a chat, of its own or after the prompt; ``DataError`` for any other."""
    *before, last = as_messages(chat) if prompt_problem(chat) is None else [{"role": ""}]
    for key in filter(last.get, _OTHER_FIELDS):
        raise DataError(
            f"{where}: the answer has {key} in addition to its content, which would be left out: write both "
            "as one text, as the model generates it"
        )
    if last["role"] != "assistant" or (before and before != as_messages(prompt or "")):
        raise DataError(
            f"{where}: expected a text, or a message of the assistant, alone or after the row's prompt, "
            f"found {chat!r:.80}"
        )
    try:
        return text_of(last["content"])
    except PromptError as error:
        raise DataError(f"{where}: {error.reason}") from None


def _with_tools(name: str, table: pa.Table, key: str) -> pa.Table:
    """Return ``table`` with the tools of each row as JSON text, which ``to_rows`` makes a list."""
    found: list[str | None] = []
    for number, value in enumerate(_values(table, key)):
        with raised_as(DataError, f"{name}, row {number}, field {key}", ValueError):
            tools = tools_of(value)
        found.append(None if tools is None else json.dumps(tools))
    texts = pa.array(found, pa.string())
    return _replaced(table, key, {key: texts, exact_name(key): texts})


def _with_column(table: pa.Table, key: str) -> pa.Table:
    """Return ``table`` with a column ``key``; a dotted name is that of a field in a nested column."""
    column: Any = _nested(table, key)
    if pa.types.is_primitive(column.type) or pa.types.is_decimal(column.type):
        if pa.types.is_floating(column.type):
            # pandas has NaN for a missing number: as text it would be the answer "nan"
            is_missing = column.is_null(nan_is_null=True)
            column = pc.call_function("if_else", [is_missing, pa.scalar(None, column.type), column])
        column = column.cast(pa.string())
    if key in table.column_names:
        return table.set_column(table.column_names.index(key), key, column)
    exact = exact_name(top := key.partition(".")[0])
    if (pa.types.is_nested(column.type) or _is_string(column.type)) and exact in table.column_names:
        found = [_value_at(row, key) for row in to_rows(table.select([top, exact]))]
        return _with_values(table, key, found)
    return table.append_column(key, column)


def with_texts(table: pa.Table, columns: Iterable[str]) -> pa.Table:
    """Return ``table`` with numbers as text in those of the ``columns`` that it has, as in training."""
    for column in columns:
        if _nested(table, column) is not None:
            table = _with_column(table, column)
    return table


def _value_at(row: Mapping[str, Any], key: str) -> Any:
    try:
        return value_at(row, key)
    except KeyError:  # a key of other rows
        return None


def _with_values(table: pa.Table, key: str, values: Iterable[Any]) -> pa.Table:
    """Return ``table`` with plain Python values as the column ``key``."""
    made = table_of(key, [{key: value} for value in values])
    return _replaced(table, key, dict(zip(made.column_names, made.columns, strict=True)))


def _replaced(table: pa.Table, key: str, columns: Mapping[str, Any]) -> pa.Table:
    """Return ``table`` with other ``columns`` in the place of ``key`` and of its exact one."""
    table = table.drop_columns(with_exact(table, key).column_names)
    for name, column in columns.items():
        table = table.append_column(name, column)
    return table


def _field(records: Any, name: str) -> Any:
    """Return a field of a column of records; null where the record is."""
    return pc.call_function("struct_field", [records], pc.StructFieldOptions(name))


def _nested(table: pa.Table, key: str) -> pa.ChunkedArray | None:
    """Return the column ``key``, or the nested one that a dotted name reaches; None if there is none."""
    if key in table.column_names:
        return table.column(key)
    top, *fields = key.split(".")
    column = table.column(top) if top in table.column_names else None
    for field in fields:
        if column is None or not pa.types.is_struct(column.type) or column.type.get_field_index(field) < 0:
            return None
        column = _field(column, field)
    return column if fields else None


def column_names(fields: Iterable[pa.Field], prefix: str = "") -> list[str]:
    """Return the names of all columns, those of records with a dot."""
    names = []
    for field in fields:
        names.append(f"{prefix}{field.name}")
        if pa.types.is_struct(field.type):
            names += column_names(field.type, f"{prefix}{field.name}.")
    return names


RESPONSE_COLUMNS = ("response", "responses", "solution_str", "completion", "output", "solution", "answer")
"""What a column of responses is usually called, the likeliest first; the last two may be right answers."""
_USUAL_NAMES = {
    "prompt": "prompt question problem instruction query input text messages conversations prompts",
    "answer": "answer solution ground_truth label target expected gold output response",
    "response": " ".join((*RESPONSE_COLUMNS, "target")),
    "chosen": "chosen preferred accepted winner better",
    "rejected": "rejected dispreferred loser worse",
}
"""What a column for a key ``data.*_key`` is usually called, the likeliest first."""
_NO_PROMPTS = {
    ("instruction", "input"): "write both in a column prompt: the instruction asks about the input",
    ("chosen", "rejected"): (
        "write the messages that chosen and rejected have in common in a column prompt, and what follows "
        "them in chosen and rejected"
    ),
}
"""Columns that hold a prompt together with others, and the remedy."""
_OTHER_SEPARATOR = re.compile(r"[|:;,\t]")
_PLAIN_NAME = re.compile(r"[\w.]+")


def require_columns(name: str, table: pa.Table, keys: Mapping[str, str]) -> None:
    """Raise :class:`DataError` for the columns that ``name`` lacks, with keys for those that it has.

    ``keys`` maps the beginning of a key ``data.*_key`` to its column. Rows of ``table`` are not read.
    """
    missing = [what for what, key in keys.items() if _nested(table, key) is None]
    if not missing or (missing == ["prompt"] and _are_in_answers(table, keys)):
        return
    found = visible_names(column_names(table.schema))
    if "prompt" in keys and len(keys) == 1 and not {"reward_model", "ground_truth"} & set(found):
        missing.append("answer")  # nothing else names the ground truths
    free = [column for column in found if column not in keys.values() and _PLAIN_NAME.fullmatch(column)]
    guesses = {}
    for what in missing:
        if guess := _meant(what, keys.get(what, ""), free):
            free.remove(guess)
            guesses[what] = guess
    lacking = [what for what in missing if what in keys]
    advice = " ".join(f"data.{what}_key={guess}" for what, guess in guesses.items())
    if not set(lacking) <= guesses.keys():
        advice = " and ".join(f"data.{what}_key" for what in lacking) + " to one of them"
    names = " and ".join(f"{keys[what]!r} (data.{what}_key)" for what in lacking)
    remedy = f"set {advice}"
    for parts, whole in _NO_PROMPTS.items():
        if "prompt" in lacking and set(parts) <= set(found):
            remedy = whole
    if "response" in lacking and "response" not in guesses and {"messages", "conversations"} & set(found):
        remedy = (
            "write a row for each answer: the messages before it in a column prompt, its text in a column "
            "response (strop docs supervised)"
        )
    if any(column != column.strip() for column in found):
        remedy = "remove the spaces around the names, and around the values below them, in the file"
    mark = _OTHER_SEPARATOR.search(found[0]) if len(found) == 1 else None
    if mark is not None and (".csv" in name or ".tsv" in name):
        remedy = (
            f"if {mark.group()!r} separates its columns, replace it: columns of a .csv file are separated by "
            f"commas, semicolons or tabs, those of a .tsv file by tabs; else {remedy}"
        )
    raise DataError(f"{name}: there is no column {names}; found {found}; {remedy}")


def _are_in_answers(table: pa.Table, keys: Mapping[str, str]) -> bool:
    """Return True for TRL's pairs with an implicit prompt: no column, and whole chats as answers."""
    if "chosen" not in keys or keys["prompt"] != "prompt" or "prompt" in table.column_names:
        return False
    names = [key for key in (keys["chosen"], keys["rejected"]) if key in table.column_names]
    kinds = [table.schema.field(name).type for name in names]
    if len(kinds) < 2 or not all(map(_are_chats, kinds)):
        return False
    lengths = pc.call_function("list_value_length", [table.column(names[0])]).fill_null(0).to_numpy()
    # an answer alone has no prompt; a schema without rows does not say
    return len(table) == 0 or int(lengths.max()) > 1


def _are_chats(kind: pa.DataType) -> bool:
    """Return True for the type of a column of lists of messages."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return is_list and pa.types.is_struct(kind.value_type) and kind.value_type.get_field_index("role") >= 0


def _meant(what: str, key: str, found: Sequence[str]) -> str | None:
    """Return the column that may have been meant: one of a similar name, or of a usual one."""
    by_name = {column.lower(): column for column in reversed(found)}
    usual = (by_name[name] for name in _USUAL_NAMES[what].split() if name in by_name)
    return nearest(key, found) or next(usual, None)


_DEEPEST = 100  # Python's own limit is 1,000 calls


def _require_names(name: str, column: str, fields: Iterable[pa.Field], depth: int = 0) -> None:
    """Raise ``UnicodeDecodeError`` for a nested name that is not UTF-8, ``DataError`` for one too deep."""
    for field in fields:
        if depth > _DEEPEST:
            raise DataError(f"{name}, field {column}: values are nested more than {_DEEPEST} deep")
        _ = field.name  # decodes it
        nested = (field.type.field(number) for number in range(field.type.num_fields))
        _require_names(name, column, nested, depth + 1)


def source_of(file: str) -> str:
    """Return the data source of rows without a column for it: their files' name; ``rows`` in memory."""
    return re.sub(r"[-_]\d+-of-\d+$", "", Path(file).stem.partition(":")[0])


# Columns that strop adds to batches; columns of a file with these names would be silently overwritten.
_RESERVED = (
    *("input_ids", "attention_mask", "position_ids", "raw_prompt", "raw_prompt_ids", "raw_tools"),
    *("uid", "seeds"),
)
_TARGET = "reward_model"
_TRUTH = "ground_truth"
_ROW = "row number"


def with_ground_truths(table: PromptTable, answer_key: str) -> PromptTable:
    """Return ``table`` with the column ``answer_key`` as the ground truth of every row, for rules."""
    fields = pc.MakeStructOptions(["style", _TRUTH])
    truth = pc.call_function("make_struct", [pa.scalar("rule"), table.table.column(answer_key)], fields)
    columns = {_TARGET: truth}
    if (exact := exact_name(answer_key)) in table.table.column_names:
        parts = ['{"style": "rule", "ground_truth": ', table.table.column(exact), "}", ""]
        columns[exact_name(_TARGET)] = pc.call_function("binary_join_element_wise", parts)
    return replace(table, table=_replaced(table.table, _TARGET, columns))


def check_columns(table: PromptTable, prompt_key: str, reward_fn_key: str) -> None:
    """Reject reserved column names, and columns of types that rewards cannot use."""
    reserved = _RESERVED if table.images is None else (*_RESERVED, "images")
    clashes = [name for name in reserved if name in table.names and name != prompt_key]
    if clashes:
        raise DataError(
            f"{', '.join(table.files)}: the columns {clashes} have names that batches use; rename them"
        )
    _check_column(table, reward_fn_key, "a string", _is_string)
    if exact_name(reward_fn_key) in table.table.column_names:
        raise DataError(
            f"{', '.join(table.files)}: field {reward_fn_key} (data.reward_fn_key): expected texts, and the "
            "values are of several types"
        )
    _check_column(table, _TARGET, "a record {style, ground_truth}", pa.types.is_struct)
    _check_column(table, "extra_info", "a record or null", pa.types.is_struct, nulls=True)


def require_ground_truths(
    table: PromptTable, reward_fn_key: str, sources: Collection[str], *, by_model: bool
) -> None:
    """Require ``reward_model.ground_truth``, which built-in scorers compare with, in rows of ``sources``.

    With ``by_model``, rows for the reward model (``reward_model.style`` is "model") need none.

    Raises :class:`DataError` naming file, row and field of the first row without a ground truth.
    """
    if not sources or reward_fn_key not in table.names:
        return
    columns = {name: table.table.column(name) for name in (reward_fn_key, _TARGET) if name in table.names}
    columns[reward_fn_key] = columns[reward_fn_key].cast(pa.large_string())
    columns[_ROW] = pa.array(np.arange(len(table)))
    rows = pa.table(columns).filter(pc.field(reward_fn_key).isin(sorted(sources)))
    if not rows:
        return
    if _TARGET not in table.names:
        raise DataError(
            f"{table.files[0]}: there is no column {_TARGET!r}; found {table.names}. Name the column of the "
            f"answer (data.answer_key), or add a record {{style, ground_truth}}: {_who_needs_it(sources)}"
        )
    fields = {field.name for field in rows.schema.field(_TARGET).type}
    problem = f"found only the fields {sorted(fields)}"
    if _TRUTH in fields:
        problem = "found null, NaN or an empty text"
        truth = pc.field(_TARGET, _TRUTH)
        is_missing = truth.is_null(nan_is_null=True)
        if _is_string(rows.schema.field(_TARGET).type.field(_TRUTH).type):
            is_missing = is_missing | (truth == "")
        rows = rows.filter(is_missing)
    if by_model and "style" in fields:
        style = pc.field(_TARGET, "style")
        rows = rows.filter(style.is_null() | (style != "model"))
    if rows:
        source = rows[reward_fn_key][0].as_py()
        raise table.error(
            rows[_ROW][0].as_py(),
            f"{_TARGET}.{_TRUTH}",
            f"{problem}, expected the answer: {_who_needs_it([source])}",
        )


def _is_string(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _who_needs_it(sources: Collection[str]) -> str:
    return f"the built-in scorer of data_source {', '.join(map(repr, sorted(sources)))} compares with it"


def _check_column(
    table: PromptTable, name: str, expected: str, fits: Callable[[pa.DataType], bool], nulls: bool = False
) -> None:
    """Check type and nulls of a column; Arrow gives all rows one type, so the first value is an example."""
    if name not in table.names:
        return
    column = table.table.column(name)
    if column.null_count and not nulls:
        row = pc.index(column.is_null(), True).as_py()
        raise table.error(row, name, f"expected {expected}, found null")
    if not fits(column.type) and column.null_count < len(column):
        row = pc.index(column.is_valid(), True).as_py()
        value = column[row].as_py()
        raise table.error(row, name, f"expected {expected}, found {type(value).__name__} {value!r:.60}")
