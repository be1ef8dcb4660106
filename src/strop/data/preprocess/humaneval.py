"""HumanEval (Chen et al. 2021): Python functions to complete from signature and docstring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from strop.data.preprocess.code import assert_tests, in_block
from strop.data.preprocess.source import read_source
from strop.data.preprocess.split import Split, make_row, text_field
from strop.errors import DataError

DATA_SOURCE = "openai/openai_humaneval"
INSTRUCTION = "Complete this Python function. Answer with the whole function in a ```python block."


def splits(
    source: str | Path | None = None, *, instruction: str = INSTRUCTION, cache_dir: str | Path | None = None
) -> dict[str, Split]:
    """Every split of ``source`` (default: the hub); a file without a split in its name is ``test``.

    Records need ``task_id``, ``prompt``, ``entry_point`` and ``test``.
    """

    def convert(record: Any, split: str, index: int) -> dict[str, Any]:
        code, entry_point = text_field(record, "prompt"), text_field(record, "entry_point")
        test = text_field(record, "test")
        if "def check(" not in test:
            raise DataError("field test: there is no function check(candidate)")
        return make_row(
            data_source=DATA_SOURCE,
            prompt=f"{instruction}\n\n{in_block(code)}",
            ability="code",
            ground_truth=assert_tests([test], entry_point=entry_point, prefix=code),
            split=split,
            index=index,
            task_id=text_field(record, "task_id"),
            answer=record.get("canonical_solution") or "",
        )

    records = read_source(source or DATA_SOURCE, cache_dir=cache_dir, unnamed_split="test")
    return {split: Split(found, convert) for split, found in records.items()}
