"""What a data set's function gives for each split, and the one shape of a prepared row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from strop.errors import DataError


@dataclass(frozen=True)
class Split:
    """Raw records, and how one becomes a row: ``convert(record, split, index)``, or a :class:`DataError`."""

    records: Sequence[Any]
    convert: Callable[[Any, str, int], dict[str, Any]]


def make_row(
    *,
    data_source: str,
    prompt: str | list[dict[str, str]],
    ability: str,
    ground_truth: str,
    split: str,
    index: int,
    style: str = "rule",
    **extra_info: Any,
) -> dict[str, Any]:
    """A row for ``strop train``; a ``prompt`` that is a text becomes one user message.

    The ground truth is a string in every data set, so that their files join.
    """
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
        "ability": ability,
        "reward_model": {"style": style, "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, **extra_info},
    }


def text_field(record: Any, name: str) -> str:
    """A non-empty string of a record, or :class:`DataError` naming the field."""
    value = record.get(name) if isinstance(record, dict) else None
    if not isinstance(value, str) or not value.strip():
        keys = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise DataError(f"field {name}: expected text, found {value!r:.60} (the record has {keys})")
    return value
