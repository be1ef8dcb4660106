"""GSM8K (Cobbe et al. 2021): grade-school word problems whose answer ends in ``#### number``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from strop.data.preprocess.source import read_source
from strop.data.preprocess.split import Split, make_row, text_field
from strop.errors import DataError

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Think step by step, then give the final answer as a plain number after "####".'

_NUMBER = re.compile(r"-?\d+(\.\d+)?")


def splits(
    source: str | Path | None = None, *, instruction: str = INSTRUCTION, cache_dir: str | Path | None = None
) -> dict[str, Split]:
    """Every split of ``source`` (default: the hub). Records need ``question`` and ``answer``."""

    def convert(record: Any, split: str, index: int) -> dict[str, Any]:
        question, answer = text_field(record, "question"), text_field(record, "answer")
        return make_row(
            data_source=DATA_SOURCE,
            prompt=f"{question}\n{instruction}",
            ability="math",
            ground_truth=final_number(answer),
            split=split,
            index=index,
            question=question,
            answer=answer,
        )

    records = read_source(source or DATA_SOURCE, hub_config="main", cache_dir=cache_dir)
    return {split: Split(found, convert) for split, found in records.items()}


def final_number(answer: str) -> str:
    """The number after the last ``####``, without ``$``, thousands separators and a trailing ``.``"""
    _, marker, tail = answer.rpartition("####")
    if not marker:
        raise DataError('field answer: there is no "####"')
    number = tail.strip().replace(",", "").replace("$", "").removesuffix(".")
    if not _NUMBER.fullmatch(number):
        raise DataError(f'field answer: expected a number after "####", found {tail.strip()!r}')
    return number
