"""Rows of the user's own: any source with a column of prompts and one of answers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from strop.data.prompts import chat_of_text, prompt_problem
from strop.data.records import as_text
from strop.data.sources import value_at
from strop.errors import DataError
from strop.prepare.source import Split, read_splits

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
    of records without one. All other columns are kept.
    """
    if source is None:
        raise DataError("table: name the rows with --source FILE")
    if data_source == "":
        raise DataError("--data-source: expected a name, found an empty text")
    columns = {"prompt_column": prompt, "answer_column": answer}
    row = partial(_row, **columns, source=data_source, instruction=instruction)
    return read_splits(source, row, cache_dir=cache_dir, unnamed_split="train", texts=(prompt, answer))


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
    kept = {name: value for name, value in record.items() if name not in (*_WRITTEN, prompt_column)}
    named = record.get("data_source") or source
    info = record.get("extra_info") or {}
    return {
        **({"data_source": named} if named else {}),
        "prompt": prompt,
        **kept,
        "reward_model": {"style": "rule", "ground_truth": as_text(answer)},
        "extra_info": {**info, "split": split, "index": index},
    }


def _field(record: Any, name: str) -> Any:
    try:
        value = value_at(record, name)
    except KeyError:
        raise DataError(f"there is no field {name}; the record has {sorted(record)}") from None
    # value != value: NaN, which pandas and CSV readers have for a missing number
    if value is None or value != value or (isinstance(value, str) and not value.strip()):
        raise DataError(f"field {name}: found {value!r}, expected a value")
    return value
