"""MBPP (Austin et al. 2021): short Python functions from a sentence and three tests."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from strop.data.preprocess.code import assert_tests, in_block
from strop.data.preprocess.source import Splits, read_source
from strop.data.preprocess.split import Split, make_row, text_field
from strop.errors import DataError

DATA_SOURCE = "google-research-datasets/mbpp"
INSTRUCTION = "Answer with the code in a ```python block. It must pass tests like this one:"

_WHOLE = "whole"
# Split and its last task number, as published (appendix of the paper, and the hub).
_LAST_TASKS = {"prompt": 10, "test": 510, "validation": 600, "train": 974}


def splits(
    source: str | Path | None = None, *, instruction: str = INSTRUCTION, cache_dir: str | Path | None = None
) -> dict[str, Split]:
    """Every split of ``source`` (default: the hub); files without a split in their names are divided by task.

    Records need ``task_id``, ``text``, ``code`` (which names the function) and ``test_list``;
    ``test_setup_code`` runs before the tests and after the answer.
    """

    def convert(record: Any, split: str, index: int) -> dict[str, Any]:
        text, code = text_field(record, "text"), _lines(text_field(record, "code"))
        tests = _tests(record)
        setup = _lines(record.get("test_setup_code") or "")
        shown = f"{setup}\n{tests[0]}".strip()
        return make_row(
            data_source=DATA_SOURCE,
            prompt=f"{text.strip()}\n{instruction}\n\n{in_block(shown)}",
            ability="code",
            ground_truth=assert_tests(
                [setup, *tests] if setup else tests, entry_point=called_function(code, tests[0])
            ),
            split=split,
            index=index,
            task_id=str(_task_number(record)),
            answer=code,
        )

    records = read_source(source or DATA_SOURCE, hub_config="full", cache_dir=cache_dir, unnamed_split=_WHOLE)
    if _WHOLE in records:
        records = _by_task(records[_WHOLE])
    return {split: Split(found, convert) for split, found in records.items()}


def called_function(code: str, test: str) -> str:
    """The first function of ``code`` that ``test`` calls."""
    try:
        defined = {node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)}
        calls = [node for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Call)]
    except SyntaxError as error:
        raise DataError(f"field code or test_list: not Python: {error}") from error
    for call in calls:
        if isinstance(call.func, ast.Name) and call.func.id in defined:
            return call.func.id
    raise DataError("field test_list: the first test calls no function of field code")


def _by_task(records: Any) -> Splits:
    divided: dict[str, list[Any]] = {split: [] for split in _LAST_TASKS}
    for record in records:
        divided[_split_of_task(_task_number(record))].append(record)
    return {split: found for split, found in divided.items() if found}


def _split_of_task(number: int) -> str:
    for split, last in _LAST_TASKS.items():
        if number <= last:
            return split
    raise DataError(f"field task_id: expected 1 to {_LAST_TASKS['train']}, found {number}")


def _task_number(record: Any) -> int:
    number = record.get("task_id") if isinstance(record, dict) else None
    if not isinstance(number, int) or number < 1:
        raise DataError(f"field task_id: expected a number from 1, found {number!r:.20}")
    return number


def _tests(record: dict[str, Any]) -> list[str]:
    tests = record.get("test_list")
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise DataError("field test_list: expected a list of assert statements")
    return [_lines(test) for test in tests]


def _lines(code: str) -> str:
    """With line ends that are one character, and without white space around."""
    return code.replace("\r\n", "\n").strip()
