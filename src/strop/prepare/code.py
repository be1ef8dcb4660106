"""Python programming problems with tests: MBPP and HumanEval.

MBPP (Austin et al. 2021) has short functions from a sentence and three tests, HumanEval (Chen et al. 2021)
functions to complete from signature and docstring.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strop.errors import DataError, raised_as
from strop.prepare.source import Split, Splits, make_row, read_splits, text_field

MBPP = "google-research-datasets/mbpp"
HUMANEVAL = "openai/openai_humaneval"
MBPP_INSTRUCTION = "Answer with the code in a ```python block. It must pass tests like this one:"
HUMANEVAL_INSTRUCTION = "Complete this Python function. Answer with the whole function in a ```python block."

_WHOLE = "whole"
_LAST_TASKS = {"prompt": 10, "test": 510, "validation": 600, "train": 974}
"""Split -> number of its last task, as published (appendix of the paper, and the hub)."""


def mbpp_splits(
    source: str | Path | None = None,
    *,
    instruction: str = MBPP_INSTRUCTION,
    cache_dir: str | Path | None = None,
) -> dict[str, Split]:
    """Return every split of ``source`` (default: the hub); unnamed files are divided by task number.

    Records need ``task_id``, ``text``, ``code`` (which names the function) and ``test_list``;
    ``test_setup_code`` runs before the tests and after the answer.
    """

    def convert(record: Any, split: str, index: int) -> dict[str, Any]:
        text, code = text_field(record, "text"), _lines(text_field(record, "code"))
        tests = _tests(record)
        setup = _lines(record.get("test_setup_code") or "")
        shown = f"{setup}\n{tests[0]}".strip()
        return make_row(
            data_source=MBPP,
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

    found = read_splits(source or MBPP, convert, hub_config="full", cache_dir=cache_dir, unnamed_split=_WHOLE)
    if _WHOLE not in found:
        return found
    return {split: Split(part, convert) for split, part in _by_task(found[_WHOLE].records).items()}


def humaneval_splits(
    source: str | Path | None = None,
    *,
    instruction: str = HUMANEVAL_INSTRUCTION,
    cache_dir: str | Path | None = None,
) -> dict[str, Split]:
    """Return every split of ``source`` (default: the hub); a file without a split in its name is ``test``.

    Records need ``task_id``, ``prompt``, ``entry_point`` and ``test``.
    """

    def convert(record: Any, split: str, index: int) -> dict[str, Any]:
        code, entry_point = text_field(record, "prompt"), text_field(record, "entry_point")
        test = text_field(record, "test")
        if "def check(" not in test:
            raise DataError("field test: there is no function check(candidate)")
        return make_row(
            data_source=HUMANEVAL,
            prompt=f"{instruction}\n\n{in_block(code)}",
            ability="code",
            ground_truth=assert_tests([test], entry_point=entry_point, prefix=code),
            split=split,
            index=index,
            task_id=text_field(record, "task_id"),
            answer=record.get("canonical_solution") or "",
        )

    return read_splits(source or HUMANEVAL, convert, cache_dir=cache_dir, unnamed_split="test")


def assert_tests(tests: list[str], *, entry_point: str, prefix: str = "") -> str:
    """Return a ground truth: tests that are Python sources, run in order in one namespace after the answer.

    ``strop docs data`` has the format. ``prefix`` runs before the answer.
    """
    return json.dumps({"kind": "assert", "prefix": prefix, "entry_point": entry_point, "tests": tests})


def in_block(code: str) -> str:
    """Return the code as a Markdown block."""
    return f"```python\n{code.rstrip()}\n```"


def called_function(code: str, test: str) -> str:
    """Return the name of the first function of ``code`` that ``test`` calls."""
    with raised_as(DataError, "field code or test_list: not Python", SyntaxError):
        defined = {node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)}
        # breadth first: of assert f(g(x)) == 1 the outer call comes first
        calls = [node for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Call)]
    for call in calls:
        if isinstance(call.func, ast.Name) and call.func.id in defined:
            return call.func.id
    raise DataError("field test_list: the first test calls no function of field code")


def _by_task(records: Sequence[Any]) -> Splits:
    divided: dict[str, list[Any]] = {split: [] for split in _LAST_TASKS}
    for record in records:
        number = _task_number(record)
        divided[next(split for split, last in _LAST_TASKS.items() if number <= last)].append(record)
    return {split: found for split, found in divided.items() if found}


def _task_number(record: Any) -> int:
    number = record.get("task_id")
    if not isinstance(number, int) or not 1 <= number <= _LAST_TASKS["train"]:
        raise DataError(f"field task_id: expected 1 to {_LAST_TASKS['train']}, found {number!r:.20}")
    return number


def _tests(record: dict[str, Any]) -> list[str]:
    tests = record.get("test_list")
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise DataError("field test_list: expected a list of assert statements")
    return [_lines(test) for test in tests]


def _lines(code: str) -> str:
    """Return the code with Unix line ends and without surrounding white space."""
    return code.replace("\r\n", "\n").strip()
