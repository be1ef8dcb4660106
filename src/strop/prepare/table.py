"""Rows of the user's own: any source with a column of prompts and one of answers."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from strop.data.prompts import chat_of_text, prompt_problem
from strop.data.records import as_text
from strop.data.sources import value_at
from strop.errors import DataError
from strop.prepare.source import Split, read_splits

logger = logging.getLogger("strop.data")

_WRITTEN = ("prompt", "data_source", "reward_model", "extra_info")


def splits(
    source: str | Path | None = None,
    *,
    prompt: str = "prompt",
    answer: str = "answer",
    data_source: str | None = None,
    instruction: str = "",
    cache_dir: str | Path | None = None,
) -> dict[str, Split]:
    """Return every split of ``source``; a file that is not named after a split is ``train``.

    ``prompt`` and ``answer`` are columns, or fields of nested ones with a dot. A prompt is a text, which
    becomes a user message with ``instruction`` after it, or a list of chat messages. ``data_source`` is that
    of records without one.

    All other columns are kept, and so are fields of ``extra_info`` and ``reward_model`` other than the ground
    truth. A column ``prompt`` next to another one of prompts is left out with a warning.
    """
    if source is None:
        raise DataError("table: name the rows with --source FILE")
    if data_source == "":
        raise DataError("--data-source: expected a name, found an empty text")
    columns = {"prompt_column": prompt, "answer_column": answer}
    row = partial(_row, **columns, source=data_source, instruction=instruction)
    found = read_splits(source, row, cache_dir=cache_dir, unnamed_split="train", texts=(prompt, answer))
    firsts = [record for one in found.values() for record in itertools.islice(one.records, 1)]
    if prompt.partition(".")[0] != "prompt" and any("prompt" in record for record in firsts):
        logger.warning("the column prompt is left out: the prompt of --prompt %s takes its name", prompt)
    return found


def _row(
    record: Any,
    split: str,
    index: int,
    *,
    prompt_column: str,
    answer_column: str,
    source: str | None,
    instruction: str,
) -> dict[str, Any]:
    prompt, answer = (_field(record, name) for name in (prompt_column, answer_column))
    prompt = as_text(prompt) if isinstance(prompt, int | float) else prompt
    if isinstance(prompt, str) and (chat := chat_of_text(prompt)):
        prompt = chat
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": f"{prompt}\n{instruction}" if instruction else prompt}]
    elif problem := prompt_problem(prompt):
        raise DataError(f"field {prompt_column}: {problem}")
    elif instruction:
        raise DataError(f"field {prompt_column}: --instruction is for prompts that are text, found messages")
    truth = answer if isinstance(answer, dict | list) else as_text(answer)
    kept = {name: value for name, value in record.items() if name not in (*_WRITTEN, prompt_column)}
    if answer_column in kept:
        kept[answer_column] = truth
    named = record.get("data_source") or source
    return {
        **({"data_source": named} if named else {}),
        "prompt": prompt,
        **kept,
        "reward_model": {"style": "rule", **_fields(record, "reward_model"), "ground_truth": truth},
        "extra_info": {"split": split, "index": index, **_fields(record, "extra_info")},
    }


def _fields(record: Any, name: str) -> dict[str, Any]:
    """Return the fields with a value of a nested record; none without it."""
    value = record.get(name) or {}
    if not isinstance(value, Mapping):
        raise DataError(f"field {name}: expected a record or null, found {value!r:.60}")
    return {key: item for key, item in value.items() if item is not None}


def _field(record: Any, name: str) -> Any:
    try:
        value = value_at(record, name)
    except KeyError:
        raise DataError(f"there is no field {name}; the record has {sorted(record)}") from None
    # value != value: NaN, which pandas and CSV readers have for a missing number
    if value is None or value != value or value in ([], {}) or (isinstance(value, str) and not value.strip()):
        raise DataError(f"field {name}: found {value!r}, expected a value")
    return value
